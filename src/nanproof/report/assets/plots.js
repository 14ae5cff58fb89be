/* The curves: one uPlot each, all with the same x axis, cursor and zoom. Buckets of many steps show as a band from the lowest to the
   highest value with the mean as a line; zoomed in around an incident every step is there. */
"use strict";
const Plots = (() => {
  const { text: number, drawable, powers } = Numbers;
  const METRICS = {
    loss: { title: "Loss", height: 220 },
    grad_norm: { title: "Gradient norm", height: 150, log: 10 },
    scale: { title: "Loss scale", height: 100, log: 2 },
    lr: { title: "Learning rate", height: 100 },
  };
  const all = []; // every plot of the page; heat maps join them
  const full = { min: 0, max: 1 };
  const view = { min: 0, max: 1 };
  const colours = {};
  let data = null, detailed = false, chosen = 0, kept = {};
  let logLoss = null; // as it was asked for; null until then

  const narrow = () => window.innerWidth <= 640;
  const gutter = () => (narrow() ? 54 : 150);
  const seen = (step) => step >= view.min && step <= view.max;
  const zoomed = () => view.min > full.min || view.max < full.max;

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "ink", "soft", "faint", "grid", "line", "band", "bad", "warn", "back", "broken", "rule"]) {
      colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    Lines.readColours(style, colours);
  }

  /* What every plot has in common. */
  function options(height, extra, lastOfGroup) {
    const grid = { stroke: () => colours.grid, width: 1 };
    const axis = { stroke: () => colours.soft, font: "11px system-ui, sans-serif", ticks: { show: false }, grid };
    const steps = (u, at) => at.map((x) => (lastOfGroup && Number.isInteger(x) ? x.toLocaleString("en") : ""));
    const { y, hooks, ...rest } = extra;
    return {
      width: 600, height: height + (lastOfGroup ? 34 : 16), padding: [8, narrow() ? 14 : 26, lastOfGroup ? 0 : 8, 0], legend: { show: false }, pxAlign: 0,
      scales: { x: { time: false, range: () => [view.min, view.max] }, y: rest.yScale || {} },
      axes: [
        { ...axis, size: lastOfGroup ? 26 : 0, show: true, values: steps },
        { ...axis, size: gutter, gap: 8, ...y },
      ],
      cursor: {
        y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: 4 },
        sync: { key: "run", setSeries: false, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => { reset(); return null; } },
      },
      hooks: {
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width > 3) setView(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setCursor: [(u) => { if (u.cursor.left >= 0 && u.cursor.event) Page.read(Math.round(u.posToVal(u.cursor.left, "x")), u); }],
        ...hooks,
      },
      ...rest,
    };
  }

  /* Adds a plot to the page and to those that zoom together. */
  function add(figure, label, opts, values) {
    const plot = new uPlot({ ...opts, width: Math.max(200, figure.clientWidth) }, values, figure);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", label);
    all.push(plot);
    plot.over.addEventListener("click", (event) => {
      const near = nearestMark(plot, event.offsetX);
      if (near) Cards.open(near[0], true);
    });
    Touch.listen(plot);
    return plot;
  }

  function nearestMark(plot, left) {
    let best = null, distance = 8;
    for (const mark of data.marks) {
      const d = Math.abs(plot.valToPos(mark[1], "x") - left);
      if (d < distance) { distance = d; best = mark; }
    }
    return best;
  }

  /* -- data ---------------------------------------------------------------------------------------------------------------- */

  /* One list of points for all curves: the buckets, with the steps around incidents in their place where one is zoomed in. */
  function points() {
    if (kept.data === data && kept.detailed === detailed) return kept.list;
    const { curves, near } = data;
    const list = [];
    const inside = new Set();
    if (detailed && near) {
      near.steps.forEach((step, i) => { list.push({ x: step, near: i }); inside.add(Math.floor(step / curves.width)); });
    }
    curves.steps.forEach((step, i) => {
      if (!inside.has(Math.floor(step / curves.width))) list.push({ x: step + (curves.width - 1) / 2, bucket: i });
    });
    list.sort((a, b) => a.x - b.x);
    kept = { data, detailed, list };
    return list;
  }

  function value(metric, point, which) {
    if (point.near !== undefined) return data.near[metric][point.near];
    const curve = data.curves[metric];
    return curve ? (curve[which] || curve.mean)[point.bucket] : null;
  }

  function nonfinite(metric, point) {
    if (point.near !== undefined) return data.near[`${metric}_bad`].includes(point.near) ? 1 : 0;
    const curve = data.curves[metric];
    return curve && curve.bad.length ? curve.bad[point.bucket] : 0;
  }

  const count = (action, point) => (point.near !== undefined ? data.near[action][point.near] : data.curves[action][point.bucket]);

  function series(metric, list, { how, to }) {
    const column = (which) => list.map((point) => {
      const x = drawable(value(metric, point, which), how === "log");
      return x === null ? null : to(x);
    });
    return [list.map((point) => point.x), column("high"), column("low"), column("mean")];
  }

  /* -- drawing ------------------------------------------------------------------------------------------------------------- */

  /* Lines of incidents over the whole height, so that the eye finds the same step in every plot. */
  function drawMarks(u) {
    const { ctx, bbox } = u;
    const inView = data.marks.filter((mark) => seen(mark[1]));
    ctx.save();
    ctx.setLineDash([]); // the last line's own may still be set
    for (const [mark, step] of inView) {
      const x = Math.round(u.valToPos(step, "x", true)) + 0.5;
      ctx.globalAlpha = mark === chosen ? 1 : Math.max(0.12, Math.min(0.5, 12 / inView.length));
      ctx.strokeStyle = colours.bad;
      ctx.lineWidth = (mark === chosen ? 2 : 1) * uPlot.pxRatio;
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    }
    ctx.restore();
  }

  /* A cross at the foot of the plot where there is no number to draw. */
  function drawNonfinite(metric, list) {
    return (u) => {
      const y = u.bbox.top + u.bbox.height - 6 * uPlot.pxRatio;
      for (const point of list()) {
        if (seen(point.x) && nonfinite(metric, point)) Shapes.cross(u.ctx, u.valToPos(point.x, "x", true), y, colours.bad);
      }
    };
  }

  /* uPlot knows no distance of ticks above 1e32, and draws none then; float32 goes to 3e38. */
  const LARGE = Array.from({ length: 61 }, (_, i) => [1, 2, 5].map((lead) => lead * 10 ** (i + 1))).flat();

  function ticksOf(metric, how) {
    const filter = (u, at) => at; // uPlot's own would leave some out
    const incrs = extent(metric).some((x) => Math.abs(x) > 1e30) ? { incrs: LARGE } : {};
    return how === "log" ? { ...incrs, filter, splits: (u, axis, low, high) => powers(metric === "scale" ? 2 : 10, low, high) } : incrs;
  }

  function scaleOf(metric, how) {
    const range = (u, low, high) => (low > 0 ? [low / 1.25, high * 1.25] : [0.1, 10]);
    if (how === "log") return { distr: 3, log: metric === "scale" ? 2 : 10, range };
    return how === "none" ? { range: [0, 1] } : {}; // without a range there would be no axis, and the steps not in line
  }

  function curve(metric, axis, last) {
    const { title, height } = METRICS[metric];
    const figure = Dom.h("figure", { id: `plot-${metric}` }, Dom.h("figcaption", {}, title));
    if (metric === "loss") {
      figure.firstChild.append(narrow() ? "" : Dom.h("br"), logButton("log", axis, () => { logLoss = !Axes.isLog(axis); }));
    }
    document.getElementById("plots").append(figure);
    const none = { stroke: "transparent", width: 0, points: { show: false } };
    let list = points();
    const plot = add(figure, label(metric), options(height, {
      yScale: axis.scale,
      y: { values: (u, at) => at.map((x) => (metric === "scale" && x > 1e3 ? `2^${Math.round(Math.log2(x))}` : number(axis.from(x)))), ...axis.ticks },
      series: [{}, none, none, { stroke: () => colours.line, width: 1.5, points: { size: 4, fill: () => colours.line } }],
      bands: [{ series: [1, 2], fill: () => colours.band }],
      hooks: { draw: [drawMarks, drawNonfinite(metric, () => list)] },
    }, last), series(metric, list, axis));
    plot.how = axis.how;
    plot.refresh = () => { list = points(); plot.setData(series(metric, list, axis), false); };
  }

  function logButton(id, axis, act) {
    const button = Dom.h("button", { type: "button", id, "aria-pressed": String(Axes.isLog(axis)), title: "linear or logarithmic (l: loss and terms)" }, "log");
    button.addEventListener("click", () => { act(); draw(); document.getElementById(id).focus({ preventScroll: true }); });
    return button;
  }

  /* What happened, in rows of signs above the curves. */
  function events() {
    const { marks, forecasts, curves, turns } = data;
    const [refused, clipped] = [curves.skipped, curves.clipped].map((counts) => counts.some(Boolean));
    const any = { incidents: marks.length, forecasts: forecasts.length, refused, clipped, "went back": turns.length };
    const rows = Object.keys(any).filter((row) => any[row]);
    if (!rows.length) return;
    const figure = Dom.h("figure", { id: "plot-events" });
    document.getElementById("plots").append(figure);
    const plot = add(figure, `Marks of ${rows.join(", ")} by step`, options(rows.length * 20 + 4, {
      yScale: { range: [0, rows.length], dir: -1 },
      y: {
        splits: () => rows.map((_, i) => i + 0.5), values: () => rows, grid: { show: false },
        font: `${narrow() ? 9 : 11}px system-ui, sans-serif`, gap: narrow() ? 3 : 8,
      },
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: { draw: [(u) => rows.forEach((row, i) => drawRow(u, row, u.valToPos(i + 0.5, "y", true)))] },
    }, false), [[full.min, full.max], [null, null]]);
    plot.refresh = () => plot.setData([[full.min, full.max], [null, null]], false);
  }

  function drawRow(u, row, y) {
    const at = (step) => u.valToPos(step, "x", true);
    if (row === "incidents") data.marks.forEach(([mark, step]) => seen(step) && Shapes.diamond(u.ctx, at(step), y, colours.bad, mark === chosen));
    if (row === "forecasts") data.forecasts.forEach(({ step }) => seen(step) && Shapes.triangle(u.ctx, at(step), y, colours.warn));
    if (row === "went back") data.turns.forEach(([from, to]) => Shapes.arrow(u, at(from), at(to), y, colours.back));
    const action = { refused: "skipped", clipped: "clipped" }[row];
    if (!action) return;
    for (const point of points()) {
      const n = seen(point.x) ? count(action, point) : 0;
      if (n && row === "refused") Shapes.cross(u.ctx, at(point.x), y, colours.bad);
      else if (n) Shapes.tick(u.ctx, at(point.x), y, colours.faint, point.near === undefined ? n / data.curves.width : 1);
    }
  }

  function label(metric) {
    const means = (data.curves[metric] || { mean: [] }).mean.filter((x) => x !== null);
    const title = METRICS[metric].title;
    if (!means.length) return `${title}: no finite values`;
    const [first, last, low, high] = [means[0], means[means.length - 1], Math.min(...means), Math.max(...means)].map(number);
    return `${title} by step: first ${first}, last ${last}, lowest ${low}, highest ${high}`;
  }

  /* -- zoom ---------------------------------------------------------------------------------------------------------------- */

  function setView(min, max) {
    const span = Math.max(max - min, Math.min(4, full.max - full.min));
    min = Math.max(full.min, Math.min(min, full.max - span));
    view.min = min; view.max = Math.min(full.max, min + span);
    const detail = Boolean(data.near) && view.max - view.min < 96 * data.curves.width;
    const changed = detail !== detailed;
    detailed = detail;
    for (const plot of all) plot.batch(() => { if (changed && plot.refresh) plot.refresh(); plot.zoomed?.(); plot.setScale("x", { min: view.min, max: view.max }); });
    Page.viewChanged(zoomed());
  }
  const reset = () => setView(full.min, full.max);
  const zoom = (factor, about = (view.min + view.max) / 2) => setView(about - (about - view.min) * factor, about + (view.max - about) * factor);
  const pan = (share) => { const d = (view.max - view.min) * share; setView(view.min + d, view.max + d); };

  function choose(mark) {
    chosen = mark;
    redraw();
  }

  function takeData(given) {
    const follow = !zoomed();
    data = given;
    const { steps, width } = data.curves;
    full.min = (steps.length ? steps[0] : 0) - 0.5;
    const ends = data.marks.map((mark) => mark[1] + 1); // an exception comes before its step is recorded
    full.max = ends.reduce((end, one) => Math.max(end, one), steps.length ? steps[steps.length - 1] + width : 1) - 0.5;
    if (follow) { view.min = full.min; view.max = full.max; }
  }

  function known(metric) {
    const curve = data.curves[metric];
    return [...(curve.low || curve.mean), ...(curve.high || [])].filter((x) => x !== null);
  }

  /* The lowest and the highest value; nothing where there is none. */
  function extent(metric) {
    const values = known(metric);
    return values.length ? [Math.min(...values), Math.max(...values)] : [];
  }

  function chooseScale(metric) {
    const [low, high] = extent(metric);
    if (low === undefined) return "none";
    return METRICS[metric].log && high > 0 ? "log" : "linear";
  }

  /* The loss is logarithmic where it lies decades apart, until somebody asks for the other; the others are as `METRICS` says. */
  function axisOf(metric) {
    if (metric === "loss") {
      const values = known(metric);
      return Axes.of(values, logLoss === null ? values.length && Axes.spread(values) : logLoss);
    }
    const how = chooseScale(metric), same = (x) => x;
    return { how, to: same, from: same, scale: scaleOf(metric, how), ticks: ticksOf(metric, how) };
  }

  function draw() {
    for (const plot of all.splice(0)) plot.destroy();
    document.getElementById("plots").replaceChildren();
    if (!data.curves.steps.length) { document.getElementById("plots").append(Dom.h("p", { class: "soft" }, "No step is recorded yet.")); return; }
    events();
    const there = Object.keys(METRICS).filter((metric) => data.curves[metric]);
    there.forEach((metric, i) => {
      curve(metric, axisOf(metric), i === there.length - 1);
      if (metric === "loss" && data.terms) Terms.draw(data.terms);
    });
    Heat.draw(data);
    setView(view.min, view.max);
  }

  /* The key turns the loss, and the terms with it. */
  function toggleLog() {
    const loss = all.find((plot) => plot.root.parentElement.id === "plot-loss");
    if (!loss) return;
    logLoss = !Axes.isLog(loss);
    Terms.setLog(logLoss);
    draw();
  }

  /* What is known of a step, for the line of numbers under the cursor. */
  function at(step) {
    const list = points();
    const found = list.reduce((best, point) => (Math.abs(point.x - step) < Math.abs(best.x - step) ? point : best), list[0]);
    if (!found) return null;
    const { steps, width } = data.curves;
    const single = found.near !== undefined || width === 1, start = steps[found.bucket];
    const said = { step: single ? `${found.x}` : `${start} to ${start + width - 1}`, values: [], notes: [] };
    for (const metric of Object.keys(METRICS)) {
      if (!data.curves[metric]) continue;
      const [mean, low, high] = ["mean", "low", "high"].map((which) => value(metric, found, which));
      const bad = nonfinite(metric, found);
      const range = mean !== null && low !== high && metric !== "lr" ? ` (${number(low)} to ${number(high)})` : "";
      const spoilt = bad && mean !== null ? `, ${bad} non-finite` : "";
      said.values.push([METRICS[metric].title.toLowerCase(), (mean !== null ? number(mean) : bad ? "non-finite" : "\u2013") + range + spoilt]);
    }
    for (const [action, word] of [["skipped", "refused"], ["clipped", "clipped"]]) {
      const n = count(action, found);
      if (n) said.notes.push(single ? word : `${n} ${word}`);
    }
    return said;
  }

  function resize() {
    for (const plot of all) {
      const width = plot.root.parentElement.clientWidth;
      if (width > 0 && width !== plot.width) plot.setSize({ width, height: plot.height });
    }
  }

  const redraw = () => all.forEach((plot) => plot.redraw(false));
  return {
    all, view, full, colours, options, add, number, narrow, readColours, takeData, draw, redraw,
    setView, reset, zoom, pan, choose, toggleLog, logButton, at, resize, drawMarks, seen, gutter, ofPart: (part) => Page.choosePart(part),
  };
})();
