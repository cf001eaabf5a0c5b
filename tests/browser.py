"""What tests ask a real browser: how far pages are wider than a phone's window, or a laptop's."""

import functools
import http.server
import json
import re
import subprocess
import threading

from helpers import find_browser

WIDTHS = (390, 1280)  # pixels, of a phone and of a laptop
MEASURE = """<body><script>
async function overflow(page, width) {
    const frame = document.createElement("iframe")
    Object.assign(frame, {src: page, width, height: 900, style: "border: 0"})
    const loaded = new Promise(done => { frame.onload = done })
    document.body.append(frame)
    await loaded
    await new Promise(done => setTimeout(done, 500))
    const beyond = frame.contentDocument.documentElement.scrollWidth - width
    frame.remove()
    return beyond
}
(async () => {
    const found = {}
    const measure = async (page, width) => { found[`${page} ${width}`] = await overflow(page, width) }
    await Promise.all(PAGES.flatMap(page => WIDTHS.map(width => measure(page, width))))
    document.body.dataset.found = JSON.stringify(found)
})()</script></body>"""


def measure_overflow(folder, pages, profile):
    """Return by how many pixels each page is wider than windows of WIDTHS; skip the test without a browser.

    folder: what is served; `measure.html` is written there.
    pages: paths in it.
    profile: a folder for the browser.
    """
    browser = find_browser()
    measure = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (folder / "measure.html").write_text(measure)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        options += ["--window-size=1400,1000", "--virtual-time-budget=120000", "--dump-dom"]
        address = f"http://127.0.0.1:{server.server_address[1]}/measure.html"
        shown = subprocess.run(
            [browser, *options, address], capture_output=True, text=True, timeout=200
        )
        server.shutdown()
    (found,) = re.findall(r'data-found="([^"]*)"', shown.stdout)
    return json.loads(found.replace("&quot;", '"'))
