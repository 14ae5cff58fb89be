/* The page of a comparison around its curves: which arms are drawn, incidents of each, keys, theme. */
"use strict";
const Page = (() => {
  const { h, text } = Dom;
  const id = (name) => document.getElementById(name);
  const data = JSON.parse(id("data").textContent);
  let current = -1;

  const { swatch } = Lines;

  /* -- arms ---------------------------------------------------------------------------------------------------------------- */

  function legend() {
    const drawn = new Set(data.charts.flatMap((chart) => chart.lines.map((line) => line.arm)));
    id("legend").replaceChildren(...data.arms.map((name, arm) => {
      const key = arm < 9 ? ` (${arm + 1})` : "";
      const button = h("button", { type: "button", "aria-pressed": "true", title: `on or off${key}; double click: this one alone` }, swatch(arm), h("bdi", {}, name));
      button.hidden = !drawn.has(arm) && !data.marks[arm].length; // an arm that was not trained has no curve
      button.addEventListener("click", () => act(Plots.toggle, arm));
      button.addEventListener("dblclick", () => act(Plots.only, arm));
      return button;
    }), h("button", { type: "button", id: "all", title: "all arms (a)", hidden: "" }, "All"));
    id("all").addEventListener("click", () => act(Plots.everyArm));
    id("readout").className = data.arms.length <= 4 ? "" : data.arms.length <= 8 ? "middle" : "tall"; // its height must not change under the cursor
  }

  function act(what, arm) {
    if (arm !== undefined && !(arm in data.arms)) return;
    what(arm);
    data.arms.forEach((_, i) => id("legend").children[i].setAttribute("aria-pressed", String(!Plots.hidden.has(i))));
    id("all").hidden = !Plots.hidden.size;
  }

  /* The cards of incidents, each in the section of its arm. */
  function incidents() {
    data.incidents.forEach((cards, arm) => {
      const parent = id(`arm-${arm}-cards`);
      if (!parent) return;
      parent.append(...cards.map((card) => Cards.make({ card }, `arm-${arm}-`, () => Plots.choose(card.step))));
      const more = Number(parent.dataset.all) - cards.reduce((sum, card) => sum + card.count, 0);
      if (more > 0) parent.after(h("p", { class: "soft" }, `${more.toLocaleString("en")} more are in its incidents.jsonl.`));
    });
  }

  function goTo(arm) {
    current = Math.max(0, Math.min(data.arms.length - 1, arm));
    id(`arm-${current}`)?.scrollIntoView({ block: "start" });
    id(`arm-${current}`)?.focus({ preventScroll: true });
  }

  function hash() {
    const card = /^#arm-\d+-incident-\d+$/.test(location.hash) && id(location.hash.slice(1));
    if (!card) return;
    card.open = true;
    card.scrollIntoView();
  }

  /* -- the line under the charts' toolbar ----------------------------------------------------------------------------------- */

  function read(step, chart) {
    const parts = Plots.at(step, chart).map(([arm, value]) => h("span", {}, swatch(arm), h("bdi", {}, data.arms[arm]), " ", h("b", {}, value)));
    id("readout").replaceChildren(h("span", {}, text(chart.title, 60), " at step ", h("b", {}, step.toLocaleString("en"))), ...parts);
  }

  function viewChanged(zoomed) {
    id("reset").disabled = !zoomed;
    const { min, max } = Plots.view;
    id("range").textContent = `Steps ${Math.ceil(min).toLocaleString("en")} to ${Math.floor(max).toLocaleString("en")} are shown.`;
    id("log-all").setAttribute("aria-pressed", String([...Plots.logs.values()].some(Boolean)));
  }

  /* -- theme and keys -------------------------------------------------------------------------------------------------------- */

  const THEMES = ["auto", "light", "dark"];
  function theme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
    id("theme").textContent = `Theme: ${name}`;
    Plots.readColours();
    Plots.redraw();
  }
  const themeNow = () => document.documentElement.dataset.theme || "auto";
  const nextTheme = () => theme(THEMES[(THEMES.indexOf(themeNow()) + 1) % 3]);

  const help = () => id("help").showModal();
  const KEYS = {
    ArrowLeft: () => Plots.pan(-0.2), ArrowRight: () => Plots.pan(0.2),
    "+": () => Plots.zoom(0.5), "=": () => Plots.zoom(0.5), "-": () => Plots.zoom(2), 0: Plots.reset, Escape: Plots.reset,
    n: () => goTo(current + 1), j: () => goTo(current + 1), p: () => goTo(current - 1), k: () => goTo(current - 1),
    a: () => act(Plots.everyArm), l: Plots.logAll, "?": help,
  };
  for (let digit = 1; digit <= 9; digit++) KEYS[digit] = () => act(Plots.toggle, digit - 1);

  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || id("help").open || !KEYS[event.key]) return;
    if (event.key.startsWith("Arrow") && event.target.closest?.(".scroll, #legend")) return; // a wide table moves itself
    event.preventDefault();
    KEYS[event.key]();
  }

  function start() {
    Plots.readColours();
    id("charts").hidden = !data.charts.length;
    legend();
    Plots.takeData(data);
    Plots.draw();
    if (data.left_out.length) id("plots").after(h("p", { class: "soft" }, "Not drawn, but in comparison.json: ", text(data.left_out.join(", "))));
    incidents();
    const buttons = {
      "zoom-in": KEYS["+"], "zoom-out": KEYS["-"], left: KEYS.ArrowLeft, right: KEYS.ArrowRight, reset: KEYS[0], "log-all": KEYS.l,
      theme: nextTheme, "help-button": help, "help-close": () => id("help").close(),
    };
    for (const [name, does] of Object.entries(buttons)) id(name).addEventListener("click", does);
    addEventListener("keydown", key);
    addEventListener("hashchange", hash);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(themeNow()));
    let narrow = Plots.narrow();
    new ResizeObserver(() => { if (narrow === Plots.narrow()) Plots.resize(); else { narrow = Plots.narrow(); Plots.draw(); } }).observe(id("plots"));
    hash();
  }

  return { read, viewChanged, start };
})();
Page.start();
