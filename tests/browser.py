"""What tests ask a real browser: how far pages are wider than a phone's window, or a laptop's."""

import functools
import http.server
import json
import queue
import subprocess
import threading

from helpers import find_browser

WIDTHS = (390, 1280)  # pixels, of a phone and of a laptop
MEASURE = """<body><script>
const found = {}
async function measure(page) {
    const frame = document.createElement("iframe")
    Object.assign(frame, {src: page, height: 900, style: "border: 0"})
    const loaded = new Promise(done => { frame.onload = done })
    document.body.append(frame)
    await loaded
    const missing = !(await fetch(page)).ok
    for (const width of WIDTHS) {
        frame.width = width
        await new Promise(done => setTimeout(done, 300))
        const root = frame.contentDocument.documentElement
        found[`${page} ${width}`] = missing ? width : root.scrollWidth - root.clientWidth
    }
    frame.remove()
}
(async () => {
    const left = [...PAGES]
    const lane = async () => { while (left.length) await measure(left.pop()) }
    await Promise.all([lane(), lane(), lane(), lane()])
    fetch("found", {method: "POST", body: JSON.stringify(found)})
})()</script></body>"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder, and takes what the page has found."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.found.put(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


def measure_overflow(folder, pages, profile):
    """Return by how many pixels each page is wider than windows of WIDTHS; skip the test without a browser.

    folder: what is served; `measure.html` is written there.
    pages: paths in it.
    profile: a folder for the browser.
    """
    browser = find_browser()
    measure = MEASURE.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS))
    (folder / "measure.html").write_text(measure)
    handler = functools.partial(Handler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.found = queue.Queue()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
        address = f"http://127.0.0.1:{server.server_address[1]}/measure.html"
        shown = subprocess.Popen(
            [browser, *options, "--window-size=1400,1000", address], stderr=subprocess.DEVNULL
        )
        try:
            return server.found.get(timeout=120)
        finally:
            shown.kill()
            shown.wait()
            server.shutdown()
