"""A real browser, as a person has it."""

import json
import shutil
from pathlib import Path

import pytest

from tests.testhosts.hosts import wait_until

__all__ = ["Browser", "needs_chromium"]

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
LIMIT = 100.0
needs_chromium = pytest.mark.skipif(None in (CHROMIUM, DRIVER), reason="there is no Chromium")


PAGE_FAULTS = """
const limit = 4.5, faults = [], root = document.documentElement;
if (root.scrollWidth > innerWidth) faults.push(`scrolls sideways: ${root.scrollWidth} of ${innerWidth} px`);
const parse = (color) => {  // a browser computes rgb(), rgba() or color(srgb ...)
  const numbers = (color.match(/[\\d.]+/g) ?? []).map(Number), scale = color.startsWith("color(") ? 255 : 1;
  return numbers.length < 3 ? [0, 0, 0, 0] : [...numbers.slice(0, 3).map((part) => part * scale), numbers[3] ?? 1];
};
const over = (top, back) => [0, 1, 2].map((at) => top[at] * top[3] + back[at] * (1 - top[3])).concat(1);
const light = ([red, green, blue]) => {
  const [r, g, b] = [red, green, blue].map((part) => (part / 255 <= 0.04045 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const fillOf = (element) => (element instanceof SVGElement && !(element instanceof SVGSVGElement) ? getComputedStyle(element).fill : getComputedStyle(element).backgroundColor);
const clipsOf = (element) => {
  const clips = [];
  for (let box = element; box; box = box.parentElement) if (getComputedStyle(box).overflow !== "visible") clips.push(box.getBoundingClientRect());
  return clips;
};
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let node = walker.nextNode(); node; node = walker.nextNode()) {
  const element = node.parentElement, words = node.data.trim();
  if (!words || element.closest("script, style, noscript, option, title, .md-annotation") || !element.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
  const range = document.createRange();
  range.selectNodeContents(node);
  const clips = clipsOf(element), told = words.slice(0, 40);
  for (const box of [...range.getClientRects()].slice(0, 3)) {
    if (box.width < 2 || box.height < 2) continue;
    for (const part of [0.1, 0.5, 0.9]) {
      const x = box.left + box.width * part, y = box.top + box.height / 2;
      if (x < 0 || y < 0 || x >= innerWidth || y >= innerHeight) continue;
      if (clips.some((clip) => x < clip.left || x > clip.right || y < clip.top || y > clip.bottom)) continue;
      const [top] = document.elementsFromPoint(x, y);
      if (top && !top.contains(element) && !element.contains(top) && !(element.closest("label, a, button")?.contains(top)))
        faults.push(`"${told}" is covered by ${top.tagName.toLowerCase()}.${top.getAttribute("class")}`);
      if (part !== 0.5) continue;
      const layers = document.elementsFromPoint(x, y).filter((layer) => layer !== element || !(layer instanceof SVGElement)).map((layer) => parse(fillOf(layer)));
      const solid = layers.findIndex((layer) => layer[3] === 1);
      const back = (solid < 0 ? layers : layers.slice(0, solid + 1)).reverse().reduce((below, layer) => over(layer, below), [255, 255, 255, 1]);
      const style = getComputedStyle(element), own = parse(element instanceof SVGElement ? style.fill : style.color);
      for (let box = element; box; box = box.parentElement) own[3] *= Number(getComputedStyle(box).opacity);
      const ink = over(own, back);
      const [dim, bright] = [light(ink), light(back)].sort((one, other) => one - other), ratio = (bright + 0.05) / (dim + 0.05);
      const size = parseFloat(style.fontSize), isLarge = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700);
      if (ratio < (isLarge ? 3 : limit)) faults.push(`"${told}" has a contrast of ${ratio.toFixed(2)}`);
    }
  }
}
return [...new Set(faults)];
"""
"""Returns what is wrong with the layout: sideways scroll, text that is covered, text of less contrast than WCAG's AA."""


class Browser:
    """Chromium, with a profile of its own."""

    def __init__(self, profile: Path) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM or ""
        for word in (
            "--headless=new",
            "--no-sandbox",
            "--disable-dev-shm-usage",
            "--disable-gpu",
            f"--user-data-dir={profile}",
        ):
            options.add_argument(word)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        self.web = webdriver.Chrome(options=options, service=Service(DRIVER))
        self.web.set_window_size(1200, 1400)
        self.asked: set[str] = set()

    def text(self, selector: str) -> str:
        return str(
            self.web.execute_script("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def shows(self, selector: str, text: str) -> str:
        """What the element shows when the text is in it."""
        return wait_until(
            lambda: shown if text in (shown := self.text(selector)) else None,
            f"{text} in {selector}",
            LIMIT,
        )

    def click(self, selector: str) -> None:
        self.web.find_element("css selector", selector).click()

    def requests(self) -> set[str]:
        """The addresses of all that this page asked for."""
        for entry in self.web.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.asked.add(message["params"]["request"]["url"])
        return self.asked

    def show_as(self, *, width: int, scheme: str = "light") -> None:
        """Show the page as a window of that width does, in light or dark, and as tall as the page is."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.web.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        height = 900
        for _ in range(2):  # the height follows from the width
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            self.web.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            height = min(12000, self.web.execute_script("return document.documentElement.scrollHeight"))

    def layout_faults(self) -> list[str]:
        """Return what PAGE_FAULTS finds."""
        return list(self.web.execute_script(PAGE_FAULTS))

    def transferred(self) -> int:
        """Return the bytes of all answers by HTTP since the last call of this or requests(), as they came over the network."""
        urls: dict[str, str] = {}
        total = 0.0
        for entry in self.web.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            params = message["params"]
            if message["method"] == "Network.requestWillBeSent":
                urls[params["requestId"]] = params["request"]["url"]
            # Chromium has pages of its own, which it loads by chrome:.
            elif message["method"] == "Network.loadingFinished" and urls.get(
                params["requestId"], ""
            ).startswith("http"):
                total += params["encodedDataLength"]
        self.asked |= set(urls.values())
        return round(total)

    def nameless(self) -> list[str]:
        """Return the roles of elements that take the focus, and have no name for a screen reader."""
        nodes = self.web.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            node["role"]["value"]
            for node in nodes
            if not node["ignored"]
            and any(item["name"] == "focusable" for item in node.get("properties", ()))
            and not node.get("name", {}).get("value")
        ]
