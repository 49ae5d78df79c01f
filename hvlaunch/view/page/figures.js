// Figures in few letters, as hvlaunch/view/text.py has them for the terminal.

const UNITS = ["B", "K", "M", "G", "T", "P"];

export function size(count) {
  if (count === null || count === undefined) return "-";
  let unit = 0;
  while (count >= 1000 && unit < UNITS.length - 1) { count /= 1024; unit += 1; }
  return `${unit && count < 10 ? count.toFixed(1) : count.toFixed(0)}${UNITS[unit]}`;
}

export const share = (part, whole = 1) =>
  part === null || part === undefined || !whole ? "-" : `${Math.round((100 * part) / whole)}%`;

export function steps(row) {
  if (row.step === null) return "-";
  const of = row.total === null ? "" : `/${row.total}`;
  const rate = row.rate === null ? "" : ` ${Number(row.rate.toPrecision(3))}/s`;
  return `${row.step}${of}${rate}`;
}

export function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

// 0-3,6 of a list of numbers.
export function folded(numbers) {
  const parts = [];
  for (const number of [...numbers].sort((one, other) => one - other)) {
    const last = parts.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}-${last}`)).join(",");
}
