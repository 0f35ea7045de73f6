"""What a browser makes of the pages: no script fails, and what they promise is drawn."""

import html
import re
import shutil
import subprocess

import jax
import keras
import numpy as np
import pytest
from dryrun.made import made_comparison, made_run
from helpers import built, mlp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from show.every_page import fragments, pages

import keras_tpu_dist as ktd

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
# Before all other scripts: what fails is kept where --dump-dom shows it.
WATCH = """<script>
const said = [];
addEventListener("error", event => said.push(event.message));
addEventListener("securitypolicyviolation", event => said.push(event.blockedURI));
addEventListener("load", () => {
  PROBE
  document.documentElement.dataset.said = said.join("; ") || "nothing";
});
</script>"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on the PATH"),
]


def opened(page, folder, probe=""):
    """The page as the browser has it after its scripts."""
    file = folder / "page.html"
    file.write_text(page.replace("<head>", "<head>" + WATCH.replace("PROBE", probe), 1))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [*command, file.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(r'<html[^>]* data-said="([^"]*)"', done.stdout)[1] == "nothing"
    return done.stdout


def body_of(dom):
    return dom[dom.index("<body") :]


def test_the_page_of_a_dry_run(tmp_path):
    page = opened(made_run().to_html(), tmp_path)
    assert 'class="bar"' in body_of(page)
    assert "evil" not in re.search(r"<title>.*?</title>", page)[0]


def test_the_page_of_a_comparison(tmp_path):
    dom = body_of(opened(made_comparison().to_html(), tmp_path))
    assert dom.count("<circle") == 4


def test_what_notebooks_show(tmp_path):
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")
    model = built(mlp, strategy)
    array = jax.device_put(np.zeros((4, 8)), NamedSharding(strategy.mesh, P(None, "model")))
    shown = [
        *(strategy.explain(model), strategy.lint(model, 13), strategy.plan(model)),
        *(strategy.show(), strategy.show(model), strategy.show(model.layers[0].kernel)),
        *(strategy.show(array), made_run(), made_comparison()),
    ]
    pages = "".join(each._repr_html_() for each in shown)
    page = f"<!doctype html><html><head></head><body>{pages}</body></html>"
    dom = body_of(opened(page, tmp_path))
    assert dom.count('<div class="ktd">') == len(shown)
    assert dom.count("<script") == 0


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_of_a_model_is_cut_off(tmp_path, width):
    """Reasons and boxes are within the window, and boxes as wide as their bytes."""
    strategy = ktd.TPUStrategy({"data": 4, "model": 2}, "tensor_parallel")

    def build():
        layers = keras.layers
        hidden = [layers.Dense(256, activation="relu", name=f"hidden_{n}") for n in range(9)]
        return keras.Sequential([keras.Input((256,)), *hidden, layers.Dense(64, name="last")])

    model = built(build, strategy)
    pages = strategy.explain(model)._repr_html_() + strategy.show(model)._repr_html_()
    probe = """
      const inside = document.querySelector("iframe").contentDocument;
      const boxes = [...inside.querySelectorAll(".box")];
      for (const each of [...inside.querySelectorAll("td:last-child, p"), ...boxes]) {
        const place = each.getBoundingClientRect();
        if (place.width && (place.right > inside.defaultView.innerWidth || place.left < 0))
          said.push(`cut off: ${each.textContent}`);
      }
      const wide = boxes.map(each => each.getBoundingClientRect().width);
      document.documentElement.dataset.share = (wide[1] / wide[0]).toFixed(2);
      document.documentElement.dataset.inner = inside.defaultView.innerWidth;
    """
    # A window cannot be as narrow as a telephone, a frame can.
    frame = f'<iframe style="width:{width}px;border:0" srcdoc="{html.escape(pages)}"></iframe>'
    dom = opened(f"<!doctype html><html><head></head><body>{frame}</body></html>", tmp_path, probe)
    assert f'data-inner="{width}"' in dom
    boxes = strategy.show(model).boxes()
    assert [box.times for box in boxes] == [4, 1, 1]  # four pairs, and one pair of two shapes
    share = float(re.search(r'data-share="([^"]*)"', dom)[1])
    assert share == pytest.approx(boxes[1].bytes / boxes[0].bytes, abs=0.01)


# What a reader cannot see: text that leaves the window or its box where nothing scrolls. Tables,
# drawings and lines to copy scroll by themselves, a page as a whole does not.
CUT_OFF = """
  const scrolls = each => /auto|scroll/.test(getComputedStyle(each).overflowX);
  const hides = each => /hidden|clip/.test(getComputedStyle(each).overflowX);
  const seen = (place, box) => place.top < box.bottom - 2 && place.bottom > box.top + 2;
  for (const frame of document.querySelectorAll("iframe")) {
    const inside = frame.contentDocument, width = frame.clientWidth;
    const wrong = what => said.push(`${frame.title} at ${width}: ${what}`);
    for (const each of [inside.documentElement, ...inside.querySelectorAll(".ktd")])
      if (each.scrollWidth > each.clientWidth) wrong(`scrolls as a whole, ${each.scrollWidth}`);
    for (const svg of inside.querySelectorAll("svg")) {
      const labels = [...svg.querySelectorAll("text:not([pointer-events])")];
      const placed = labels.map(each => each.getBoundingClientRect());
      const whole = svg.getBoundingClientRect();
      placed.forEach((one, n) => {
        if (one.right > whole.right + 1 || one.left < whole.left - 1) wrong(labels[n].textContent);
        for (const other of placed.slice(n + 1))
          if (one.right > other.left + 1 && other.right > one.left + 1 && seen(one, other))
            wrong(`over another: ${labels[n].textContent}`);
      });
    }
    const texts = inside.createTreeWalker(inside.body, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const text = texts.currentNode, range = inside.createRange();
      if (!text.data.trim() || text.parentElement.closest("style, script")) continue;
      range.selectNodeContents(text);
      const place = range.getBoundingClientRect();
      let each = text.parentElement;
      for (; each && !scrolls(each); each = each.parentElement) {
        const box = each.getBoundingClientRect();
        if (hides(each) && place.right > box.right + 1 && seen(place, box)) wrong(text.data);
      }
      if (each?.className === "ktd" && place.right > width + 1) wrong(text.data);
    }
  }
"""


def test_nothing_of_any_page_is_cut_off(tmp_path):
    """On a telephone and on a screen, whatever names and numbers of devices there are."""
    shown = [(case, page.to_html()) for case, page in pages()]
    shown += [(case, f"<body>{each._repr_html_()}") for case, each in [*pages(), *fragments()]]
    frames = [
        f'<iframe title="{case}" style="width:{width}px;border:0" srcdoc="{html.escape(page)}">'
        "</iframe>"
        for case, page in shown
        for width in (390, 1280)
    ]
    whole = f"<!doctype html><html><head></head><body>{''.join(frames)}</body></html>"
    opened(whole, tmp_path, CUT_OFF)
