"""Take the README's picture: the first screen of the demo's page. The verdicts on it are stored as the picture's text.

    tsae demo --to demo && python scripts/take_picture.py demo

tests/app/test_demo.py compares them, and the README, with what the demo finds.
"""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path

from playwright.sync_api import sync_playwright
from run_notebooks import CHROMIUM

import tsae
from tsae.report.story.findings import findings_content

PICTURE = Path(__file__).parents[1] / "docs" / "report.png"


def main(demo: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 1280, "height": 960}, offline=True).new_page()
        page.goto((Path(demo).resolve() / "report.html").as_uri())
        page.wait_for_selector("#explorer[data-ready=yes]")
        picture = page.screenshot()
        browser.close()
    found = findings_content(tsae.FeatureDiff.load(Path(demo) / "diff"))["findings"]
    text = "\n".join(one["sentences"][0] for one in found if one["lights"])
    chunk = b"iTXtDescription\0\0\0\0\0" + text.encode()
    head = 33  # the signature, and the chunk that comes first
    length, check = struct.pack(">I", len(chunk) - 4), struct.pack(">I", zlib.crc32(chunk))
    PICTURE.write_bytes(picture[:head] + length + chunk + check + picture[head:])


if __name__ == "__main__":
    main(*sys.argv[1:])
