"""`--dry-run` shows no secret, whatever its variable is called and wherever it stands on the command line."""

import base64
import random
import string

import pytest

from hvlaunch.cli.main import main
from hvlaunch.console.masking import MASK, masked_value, masked_words

RANDOM = random.Random(12)


def made_of(alphabet: str, length: int) -> str:
    return "".join(RANDOM.choice(alphabet) for _ in range(length))


HEX = "0123456789abcdef"
SECRETS = {
    "GitHub": "ghp_" + made_of(string.ascii_letters, 36),
    "GitHub, fine-grained": "github_pat_"
    + made_of(string.ascii_letters, 22)
    + "_"
    + made_of(string.ascii_letters, 59),
    "GitLab": "glpat-" + made_of(string.ascii_letters, 20),
    "Hugging Face": "hf_" + made_of(string.ascii_letters, 34),
    "OpenAI": "sk-proj-" + made_of(string.ascii_letters, 40),
    "Stripe": "sk_live_" + made_of(string.ascii_letters, 24),
    "AWS": "AKIA" + made_of(string.ascii_uppercase, 16),
    "Slack": "xoxb-" + made_of(string.digits, 12) + "-" + made_of(string.ascii_letters, 24),
    "Weights & Biases": made_of(HEX, 40),
    "JWT": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJtZSJ9." + made_of(string.ascii_letters, 43),
    "base64": base64.b64encode(RANDOM.randbytes(32)).decode(),
    "letters and digits": made_of(string.ascii_letters + string.digits, 32),
    "a private key": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNz\n-----END OPENSSH PRIVATE KEY-----",
}
ELSEWHERE = [
    ("postgresql://me:hunter2@db/x", "hunter2"),
    ("https://me:hun/ter2@proxy:3128/", "ter2"),
    ("redis://:hunter2@cache", "hunter2"),
    ("https://hunter2@host/x", "hunter2"),
    ("https://host/x?a=1&token=hunter2&b=2", "hunter2"),
    ("https://host/x?sig=hunter2", "hunter2"),
    ("Server=db;Password=hunter2;Timeout=3", "hunter2"),
    ('{"api_key": "hunter2", "n": 1}', "hunter2"),
    ("--opt --password=hunter2 --n 3", "hunter2"),
    ("export WANDB_API_KEY=hunter2; python train.py", "hunter2"),
    ("Authorization: Bearer=hunter2", "hunter2"),
]
HARMLESS = [
    "/usr/lib/python3/dist-packages:/home/ada/experiments/resnet50-imagenet",
    "libGLX_nvidia.so.0:libcuda.so.1",
    "GradientAccumulationSteps4Test",
    "meta-llama/Llama-3.1-405B-Instruct-FP8",
    "2026-11-22T11:28:03.123456+00:00",
    "expandable_segments:True,max_split_size_mb:128",
    "0,1,2,3,4,5,6,7",
    "GPU-5a1d3c5e-8f7b-4b7a-9c3d-1e2f3a4b5c6d",
    "https://host:8080/path?epochs=90",
    "tokenizer=bert-base-uncased",
    "en_US.UTF-8",
    "conda-forge::pytorch=2.5.1=cuda126_py311h6a678d5_0",
    "max_tokens=512",
    "torchrun --nproc-per-node=8 --rdzv-backend=c10d train_gpt2_with_flash_attention.py",
]


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("form", ["{}", "x={}", "a,{},b", "--header={}", "run {} now"])
def test_a_secret_is_known_by_its_look(name: str, form: str) -> None:
    shown = masked_value(form.format(SECRETS[name]))
    assert SECRETS[name] not in shown
    assert MASK in shown


@pytest.mark.parametrize(("text", "secret"), ELSEWHERE)
def test_a_secret_is_recognized_by_the_text_before_it(text: str, secret: str) -> None:
    assert secret not in masked_value(text)


@pytest.mark.parametrize("text", HARMLESS)
def test_values_that_are_no_secrets_are_shown(text: str) -> None:
    assert masked_value(text) == text


@pytest.mark.parametrize(
    "option", ["--api-key", "--token", "--hf-token", "--wandb_api_key", "--password", "-password"]
)
def test_the_word_behind_an_option(option: str) -> None:
    assert list(masked_words(["train.py", option, "hunter2", "x"])) == ["train.py", option, MASK, "x"]


@pytest.mark.parametrize(
    "words",
    [["--max-tokens", "512"], ["--token", "--verbose"], ["--use-auth-token", "true"], ["--author", "ada"]],
)
def test_options_that_only_sound_secret(words: list[str]) -> None:
    assert list(masked_words(words)) == words


LONG = {
    "URL": "://" + "a:" * 50_000,
    "name": "token" * 30_000,
    "word": "x" * 130_000,
    "spaces": "password" + " " * 100_000,
    "dots": "a.-" * 40_000,
    "JWT": "eyJ" + "a" * 130_000,
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", LONG)
def test_no_value_takes_long(name: str) -> None:
    assert masked_value(LONG[name])


def dry_run(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert (
        main(
            [
                "--dry-run",
                "--verbose",
                *options,
                "-x",
                f"NOTES={SECRETS['AWS']}",
                "-x",
                "DB=postgresql://me:hunter2@db/x",
                "prog",
                "--api-key",
                "hunter2",
                "ghp_" + "x" * 36,
            ]
        )
        == 0
    )
    return capsys.readouterr().out


def test_a_plan_hides_secrets_and_tells_how_to_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys)
    assert "hunter2" not in text
    assert SECRETS["AWS"] not in text
    assert "ghp_" not in text
    assert "  prog --api-key **** ****\n" in text
    assert "\n**** hides what may be a secret; --show-secrets shows it\n" in text


def test_a_plan_shows_secrets_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, "--show-secrets")
    assert MASK not in text
    assert text.count("hunter2") == 2
    assert f"  NOTES={SECRETS['AWS']}\n" in text
