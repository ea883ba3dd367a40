"""Writes the pictures of the page in docs/: in the light, in the dark and on a phone.

python scripts/write_pictures.py RUN

RUN is a finished run of the demo in a folder named `outputs`. Needs chromium and chromedriver
(`scripts/setup dev`), and `pip install pillow`.
"""

from __future__ import annotations

import io
import shutil
import sys
import threading
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver

from ppo_cli.report.page.run_data import RunData
from ppo_cli.report.page.server import PageServer

DOCS = Path(__file__).parent.parent / "docs"
# Goes to the responses, and chooses one of the best that was not good at the start.
CHOOSE = """
const views = [...document.querySelectorAll('#views button')];
views.find((button) => button.textContent === 'best now and the first response').click();
document.getElementById('rollouts').scrollIntoView();
setTimeout(() => document.querySelector('#table tbody tr').click(), 1500);
"""
# Name, width and height in pixels, colours, and what is done before the picture is taken.
PICTURES = (
    ("page-light", 1200, 900, "light", ""),
    ("page-dark", 1200, 800, "dark", CHOOSE),
    ("page-phone", 390, 840, "light", ""),
)
SECONDS = 4.0  # until curves, rows and the chosen response are drawn


def main(run: Path) -> None:
    """Serve the run, open the page as each picture needs it, and keep what is seen."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("chromium-browser") or ""
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage"):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    with PageServer([RunData(run, run.resolve().name)]) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name, width, height, colours, script in PICTURES:
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            scheme = {"features": [{"name": "prefers-color-scheme", "value": colours}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
            driver.get(server.url)
            time.sleep(SECONDS)
            driver.execute_script(script)
            time.sleep(SECONDS)
            seen = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            seen.quantize(128).save(DOCS / f"{name}.png", optimize=True)
    driver.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
