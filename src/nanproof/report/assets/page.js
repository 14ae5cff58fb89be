/* The page around curves and cards: figures at the top, tables, keys, theme, and the new data of a live page. */
"use strict";
const Page = (() => {
  const { h, text } = Dom;
  const id = (name) => document.getElementById(name);
  let data = JSON.parse(id("data").textContent), held = false, tag = null, part = 0, drawn = data;

  function numbers() {
    const bad = ({ label, value }) => (label === "incidents" || label === "refused" ? value !== "0" : label === "last loss" && /nan|inf/.test(value));
    const look = (one) => (one.label === "state" ? `state-${one.value}` : bad(one) ? "count-bad" : "");
    id("numbers").replaceChildren(...data.numbers.map((one) => h("div", {}, h("dt", {}, one.label),
      h("dd", { class: look(one) }, text(one.value), one.more ? h("small", {}, text(one.more, 60)) : ""))));
    id("summary").textContent = data.summary;
    id("readout").className = data.terms?.lines.length > 10 ? "tall" : data.terms?.lines.length > 4 ? "middle" : ""; // its height must not change under the cursor
    document.title = `${data.name}: nanproof report`;
  }

  /* Forecasts, recoveries, quarantine, checkpoints: a cell is text, or has a tag. */
  function tables() {
    const tag = (word) => h("span", { class: `tag ${{ good: "yes", candidate: "no" }[word] || "bad"}` }, word);
    const cell = (said) => (typeof said === "string" ? text(said) : h("span", {}, tag(said.tag), " ", text(said.text)));
    const numeric = (head) => (head.startsWith("#") ? { class: "num" } : {});
    id("tables").replaceChildren(...data.tables.map(({ title, heads, rows, note }) => h("section", {}, h("h2", {}, title),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": title }, h("table", {},
        h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col", ...numeric(head) }, head.replace("#", ""))))),
        h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map((said, i) => h("td", numeric(heads[i]), cell(said)))))))),
      note ? h("p", { class: "soft" }, note) : "")));
    id("facts").hidden = !data.facts.length;
    id("facts-list").replaceChildren(...data.facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, text(value, 500))]));
    const broken = data.broken ? ` ${data.broken} lines of its files are no records and were passed over.` : "";
    const when = data.made.replace("T", " ").replace("+00:00", " UTC");
    id("made").textContent = `Made by nanproof ${data.version} on ${when} from ${data.folder}.${broken}`;
  }

  /* The line of numbers for the step under the cursor. */
  function read(step, plot) {
    const found = Plots.at(step);
    if (!found) return;
    const cell = plot.cell ? plot.cell(step, plot.cursor.top) : null;
    const parts = [h("span", {}, "step ", h("b", {}, found.step))];
    if (cell) parts.push(h("span", { class: "long" }, `${cell.what} of `, h("b", {}, h("bdi", {}, cell.name)), ` ${cell.value}`));
    else parts.push(...(plot.told ? plot.told(step) : found.values).map(([name, value]) => h("span", {}, h("bdi", {}, name), " ", h("b", {}, value))), h("span", {}, found.notes.join(", ")));
    const forecast = drawn.forecasts.find((one) => Math.abs(plot.valToPos(one.step, "x") - plot.cursor.left) < 5);
    if (forecast && !cell) parts.push(h("span", { class: "long" }, "forecast: ", text(forecast.message, 160)));
    id("readout").replaceChildren(...parts);
  }

  function viewChanged(zoomed) {
    id("reset").disabled = !zoomed;
    const { min, max } = Plots.view;
    id("range").textContent = `Steps ${Math.ceil(min).toLocaleString("en")} to ${Math.floor(max).toLocaleString("en")} are shown.`;
  }

  /* -- theme --------------------------------------------------------------------------------------------------------------- */

  const THEMES = ["auto", "light", "dark"];
  function theme(name) {
    if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
    id("theme").textContent = `Theme: ${name}`;
    Plots.readColours();
    Plots.redraw();
  }
  function nextTheme() {
    const now = document.documentElement.dataset.theme || "auto";
    theme(THEMES[(THEMES.indexOf(now) + 1) % 3]);
  }

  /* -- keys ---------------------------------------------------------------------------------------------------------------- */

  const help = () => id("help").showModal();
  const KEYS = {
    ArrowLeft: () => Plots.pan(-0.2), ArrowRight: () => Plots.pan(0.2),
    "+": () => Plots.zoom(0.5), "=": () => Plots.zoom(0.5), "-": () => Plots.zoom(2), 0: Plots.reset, Escape: Plots.reset,
    n: () => Cards.step(1), j: () => Cards.step(1), p: () => Cards.step(-1), k: () => Cards.step(-1), l: Plots.toggleLog, "?": help,
  };
  function key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || id("help").open || !KEYS[event.key]) return;
    if (event.key.startsWith("Arrow") && event.target.closest?.(".scroll")) return; // a wide table moves itself
    event.preventDefault();
    KEYS[event.key]();
  }

  function hash() {
    const match = /^#incident-(\d+)$/.exec(location.hash);
    if (match) Cards.open(Number(match[1]), true);
  }

  /* -- live ---------------------------------------------------------------------------------------------------------------- */

  async function poll() {
    try {
      const headers = window.nanproofToken ? { Authorization: `Bearer ${window.nanproofToken}` } : {}; // of `nanproof watch --web`
      const answer = await fetch(data.live, { cache: "no-store", headers: tag ? { ...headers, "If-None-Match": tag } : headers });
      if (!answer.ok && answer.status !== 304) throw new Error(String(answer.status));
      id("lost").hidden = true;
      if (answer.status === 200 && !held) { // while somebody drags, the next time
        data = { ...await answer.json(), live: data.live };
        tag = answer.headers.get("ETag");
        show();
      }
    } catch {
      id("lost").hidden = false; // the server has ended: what is shown stays
    }
    setTimeout(poll, 2000);
  }

  /* Curves and marks are those of one optimizer of the run. */
  function ofPart() {
    const names = data.optimizers.slice(0, 1 + data.parts.length).map((one) => one.name);
    part = Math.min(part, data.parts.length);
    id("optimizer").hidden = names.length < 2;
    id("optimizer-choice").replaceChildren(...names.map((name, i) => h("option", { value: String(i) }, text(name))));
    id("optimizer-choice").value = String(part);
    return part ? { ...data, ...data.parts[part - 1] } : data;
  }

  function choosePart(number) {
    if (number === part || number > data.parts.length) return;
    part = number;
    show();
    Plots.reset();
  }

  function show() {
    const top = scrollY, focused = document.activeElement.id;
    numbers();
    tables();
    drawn = ofPart();
    Plots.takeData(drawn);
    Cards.update(data);
    Plots.draw();
    scrollTo(scrollX, top);
    if (focused && document.activeElement === document.body) id(focused)?.focus({ preventScroll: true });
  }

  function start() {
    Plots.readColours();
    show();
    const buttons = {
      "zoom-in": KEYS["+"], "zoom-out": KEYS["-"], left: KEYS.ArrowLeft, right: KEYS.ArrowRight, reset: KEYS[0],
      previous: KEYS.p, next: KEYS.n, theme: nextTheme, "help-button": help, "help-close": () => id("help").close(),
    };
    for (const [name, act] of Object.entries(buttons)) id(name).addEventListener("click", act);
    for (const [event, down] of [["pointerdown", true], ["pointerup", false], ["pointercancel", false]]) addEventListener(event, () => { held = down; });
    id("optimizer-choice").addEventListener("change", (event) => choosePart(Number(event.target.value)));
    addEventListener("keydown", key);
    addEventListener("hashchange", hash);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme(document.documentElement.dataset.theme || "auto"));
    let narrow = Plots.narrow();
    new ResizeObserver(() => { if (narrow === Plots.narrow()) Plots.resize(); else { narrow = Plots.narrow(); Plots.draw(); } }).observe(id("plots"));
    hash();
    if (data.live) setTimeout(poll, 2000);
  }

  return { read, viewChanged, choosePart, start };
})();
Page.start();
