"""JupyterLab in a real browser: notebooks run to their end, and a slider changes a figure. `make test-browser`.

Needs Debian's chromium (or one at CHROMIUM): missing, it fails in CI and is a skip elsewhere. The notebooks are run as
copies without outputs, so that what is seen comes from this run and the committed files stay as they are.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).parents[1]
LIMIT = time.monotonic() + 600  # seconds for everything here together
TRIED = ["00_tour", "03_attention", "06_vision"]


def left(most: float = 60) -> float:
    """Milliseconds to wait: `most` seconds, and no more than remain of the limit."""
    return 1000 * max(0.001, min(most, LIMIT - time.monotonic()))


@pytest.fixture(scope="module")
def chromium() -> str:
    found = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if found is None:
        reason = "no chromium: `apt-get install chromium`, or set CHROMIUM to its path"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The notebooks without outputs, beside what they read."""
    folder = tmp_path_factory.mktemp("clone")
    for name in ("notebooks", "examples", "figures"):
        shutil.copytree(ROOT / name, folder / name)
    for path in (folder / "notebooks").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs, cell.execution_count = [], None
        nbformat.write(notebook, path)
    return folder


@pytest.fixture(scope="module")
def lab(folder, tmp_path_factory) -> Iterator[str]:
    """The address of a JupyterLab that serves `folder`, {0} being a notebook's name; its settings are its own.

    A workspace for each notebook: a tab that another test left open would open again.
    """
    home = tmp_path_factory.mktemp("home")
    settings = {
        "notebook-extension/tracker": {"windowingMode": "none"},  # every cell in the page, also what is out of sight
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    for name, value in settings.items():
        path = home / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token = secrets.token_hex()
    environment = os.environ | {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "PYTHONPATH": str(ROOT)}
    environment |= {f"JUPYTER_{kind}_DIR": str(home / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.root_dir={folder}"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}"]
    log = home / "log"
    with log.open("wb") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
    try:
        while not _answers(f"http://127.0.0.1:{port}/api"):
            assert server.poll() is None, f"JupyterLab ended:\n{log.read_text()}"
            assert time.monotonic() < LIMIT, f"JupyterLab does not answer:\n{log.read_text()}"
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/lab/workspaces/{{0}}/tree/notebooks/{{0}}.ipynb?token={token}"
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # the kernels with it
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except OSError:
        return False


@pytest.fixture
def page(chromium) -> Iterator[Page]:
    arguments = ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(left())
        yield page
        browser.close()


@pytest.mark.parametrize("stem", TRIED)
def test_runs_to_its_end_and_sliders_redraw(stem, lab, page):
    source = (ROOT / f"notebooks/{stem}.ipynb").read_text(encoding="utf-8")
    page.goto(lab.format(stem))
    notebook = page.locator(".jp-Notebook")
    cells = source.count('"cell_type": "code"')
    expect(notebook.locator(".jp-CodeCell")).to_have_count(cells, timeout=left())
    page.get_by_role("button", name="| Idle").wait_for(timeout=left())  # in the status bar: a kernel is there
    prompts = notebook.locator(".jp-CodeCell .jp-InputPrompt")
    for _ in range(5):  # a click while the page still settles is lost now and then
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        with contextlib.suppress(AssertionError):
            expect(prompts.first).not_to_have_text("[ ]:", timeout=left(10))
            break

    error = notebook.locator("[data-mime-type='application/vnd.jupyter.error']")
    done = prompts.filter(has_text=re.compile(r"^\[\d+\]:$"))
    expect(done.nth(cells - 1).or_(error.first)).to_be_attached(timeout=left(300))
    assert error.all_inner_texts() == []
    assert notebook.locator("[data-mime-type='application/vnd.jupyter.stderr']").all_inner_texts() == []

    pictures = notebook.locator(".widget-html img")
    assert "nb.explore(" in source
    expect(pictures).to_have_count(source.count("nb.explore("), timeout=left())
    for picture, handle in zip(pictures.all(), _first_sliders(notebook), strict=True):
        before = picture.get_attribute("src")
        handle.focus()
        handle.press("ArrowRight")
        expect(picture).not_to_have_attribute("src", before, timeout=left())
        assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") > 100


def _first_sliders(notebook) -> list:
    boxes = notebook.locator(".widget-vbox").filter(has=notebook.page.locator(".widget-html"))
    return [box.locator(".noUi-handle").first for box in boxes.all()]
