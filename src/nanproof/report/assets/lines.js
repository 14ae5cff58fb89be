/* The curves of a comparison: a chart for every name, a line for every arm, one x axis, cursor and zoom for all. Where an arm logged
   NaN or Inf there is no point to draw, so crosses stand under the chart, a row an arm; under the first chart the incidents of guards too. */
"use strict";
const Plots = (() => {
  const { text: number, drawable } = Numbers;
  const LANE = 10;
  const all = [], full = { min: 0, max: 1 }, view = { min: 0, max: 1 }, colours = {}, hidden = new Set(), logs = new Map();
  let data = null, marked = null;

  const narrow = () => window.innerWidth <= 640;
  const gutter = () => (narrow() ? 54 : 150);
  const zoomed = () => view.min > full.min || view.max < full.max;
  const colour = (arm) => colours[`arm-${arm % Lines.COLOURS}`];
  const middle = (x) => x + (data.width - 1) / 2;

  function readColours() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["soft", "faint", "grid", "bad", "rule"]) colours[name] = style.getPropertyValue(`--${name}`).trim();
    Lines.readColours(style, colours);
  }

  /* -- axes ---------------------------------------------------------------------------------------------------------------- */

  const values = (lines) => lines.flatMap((line) => [...(line.low || line.mean), ...(line.high || [])]).filter((x) => x !== null);

  /* Logarithmic from the start where values lie decades apart; hiding an arm does not change that. */
  function axisOf(chart, lines) {
    const known = values(lines);
    if (!logs.has(chart.key) && known.length) logs.set(chart.key, Axes.spread(known));
    return Axes.of(known, logs.get(chart.key));
  }

  /* -- drawing ------------------------------------------------------------------------------------------------------------- */

  /* The rows under a chart: what each is of, how far below the chart it is, and what is drawn in it. */
  function lanesOf(lines, first) {
    const bad = lines.filter((line) => line.bad.length), top = 14; // clear of the lowest number of the axis
    const lanes = bad.map((line, i) => ({ name: kinds(line), below: top + i * LANE, draw: (u, y) => drawSpans(u, y, line) }));
    const arms = data.arms.map((_, arm) => arm).filter((arm) => first && data.marks[arm].length && !hidden.has(arm));
    const next = top + bad.length * LANE + (bad.length ? 4 : 0);
    return [...lanes, ...arms.map((arm, i) => ({ name: "incidents", below: next + i * LANE, draw: (u, y) => drawIncidents(u, y, arm) }))];
  }

  function drawLanes(lanes) {
    return (u) => {
      const { ctx, bbox } = u, p = uPlot.pxRatio, y = (lane) => bbox.top + bbox.height + lane.below * p;
      ctx.save();
      ctx.setLineDash([]); // the last line's own is still set
      ctx.font = `${(narrow() ? 9 : 11) * p}px system-ui, sans-serif`;
      ctx.fillStyle = colours.soft;
      ctx.textAlign = "right";
      ctx.textBaseline = "middle";
      for (const name of new Set(lanes.map((lane) => lane.name))) { // once for all rows of a kind, in the middle of them
        const rows = lanes.filter((lane) => lane.name === name);
        ctx.fillText(name, bbox.left - 8 * p, (y(rows[0]) + y(rows[rows.length - 1])) / 2);
      }
      for (const lane of lanes) lane.draw(u, y(lane));
      ctx.restore();
    };
  }

  function drawSpans(u, y, line) {
    for (const [first, last] of line.bad) if (last >= view.min && first <= view.max) Shapes.span(u, first, last, y, colour(line.arm));
  }

  function drawIncidents(u, y, arm) {
    for (const step of data.marks[arm]) {
      if (step >= view.min && step <= view.max) Shapes.draw(u.ctx, u.valToPos(step, "x", true), y, colour(arm), [[[0, -4], [4, 0], [0, 4], [-4, 0]]], { solid: true });
    }
  }

  function kinds(line) {
    const found = new Set(line.bad.map((span) => span[3]));
    return found.size > 1 ? "NaN, Inf" : found.has("nan") ? "NaN" : "Inf";
  }

  /* The step of the incident that was opened last. */
  function drawMarked(u) {
    if (marked === null || marked < view.min || marked > view.max) return;
    const x = u.valToPos(marked, "x", true), { ctx, bbox } = u;
    ctx.save();
    ctx.setLineDash([]);
    ctx.strokeStyle = colours.bad;
    ctx.lineWidth = uPlot.pxRatio;
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    ctx.restore();
  }

  function seriesOf(line, banded) {
    const none = { stroke: "transparent", width: 0, points: { show: false } };
    const stroke = () => colour(line.arm), dash = Lines.dash(line.arm);
    const mean = { stroke, width: 1.6, dash, points: { size: 4, fill: stroke } };
    return banded ? [none, none, mean] : [mean];
  }

  /* One list of steps for all lines; what a line does not have at a step of another one is no gap in it. */
  function columnsOf(lines, banded, to) {
    const shown = (list) => list.map((x) => (x === null ? null : to(drawable(x))));
    const tables = lines.map((line) => [line.x.map(middle), ...(banded ? [shown(line.high), shown(line.low)] : []), shown(line.mean)]);
    return tables.length > 1 ? uPlot.join(tables, tables.map((table) => table.map(() => 2))) : tables[0];
  }

  function options(height, lanes, { from, scale, ticks }, extra) {
    const grid = { stroke: () => colours.grid, width: 1 };
    const axis = { stroke: () => colours.soft, font: "11px system-ui, sans-serif", ticks: { show: false }, grid };
    const room = lanes.length ? lanes[lanes.length - 1].below + 6 : 0;
    return {
      width: 600, height: height + room + 34, padding: [8, narrow() ? 14 : 26, 0, 0], legend: { show: false }, pxAlign: 0,
      scales: { x: { time: false, range: () => [view.min, view.max] }, y: scale },
      axes: [
        { ...axis, size: 26 + room, gap: 5 + room, values: (u, at) => at.map((x) => (Number.isInteger(x) ? x.toLocaleString("en") : "")) },
        { ...axis, size: gutter, gap: 8, values: (u, at) => at.map((y) => number(from(y))), ...ticks },
      ],
      cursor: {
        y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: 4 },
        sync: { key: "arms", setSeries: false, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => { reset(); return null; } },
      },
      ...extra,
    };
  }

  function draw() {
    for (const plot of all.splice(0)) plot.destroy();
    const parent = document.getElementById("plots");
    parent.replaceChildren();
    data.charts.forEach((chart, i) => drawChart(chart, i, parent));
    setView(view.min, view.max);
  }

  function drawChart(chart, i, parent) {
    const lines = chart.lines.filter((line) => !hidden.has(line.arm)), lanes = lanesOf(lines, i === 0);
    const axis = axisOf(chart, lines), banded = data.width > 1, isLog = Axes.isLog(axis);
    const button = Dom.h("button", { type: "button", "aria-pressed": String(isLog), title: "linear or logarithmic" }, "log");
    button.addEventListener("click", () => { logs.set(chart.key, !logs.get(chart.key)); draw(); document.querySelector(`#chart-${i} button`).focus(); });
    const caption = Dom.h("figcaption", {}, Dom.h("bdi", {}, chart.title), narrow() ? "" : Dom.h("br"), button);
    const figure = Dom.h("figure", { id: `chart-${i}` }, caption);
    parent.append(figure);
    const columns = lines.length ? columnsOf(lines, banded, axis.to) : [[full.min, full.max], [null, null]];
    const opts = options(i ? 170 : 230, lanes, axis, {
      series: [{}, ...(lines.length ? lines.flatMap((line) => seriesOf(line, banded)) : [{ points: { show: false } }])],
      bands: banded ? lines.map((line, k) => ({ series: [3 * k + 1, 3 * k + 2], fill: () => `${colour(line.arm)}${lines.length > 4 ? "14" : "2b"}` })) : [],
      hooks: {
        draw: [drawMarked, drawLanes(lanes)],
        setSelect: [(u) => {
          const { left, width } = u.select;
          if (width > 3) setView(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        }],
        setCursor: [(u) => { if (u.cursor.left >= 0 && u.cursor.event) Page.read(Math.round(u.posToVal(u.cursor.left, "x")), chart); }],
      },
    });
    const plot = new uPlot({ ...opts, width: Math.max(200, figure.clientWidth) }, columns, figure);
    plot.root.setAttribute("role", "img");
    plot.root.setAttribute("aria-label", label(chart, lines));
    Object.assign(plot, { lanes, how: axis.how });
    all.push(plot);
    Touch.listen(plot);
  }

  function label(chart, lines) {
    const said = lines.map((line) => {
      const known = line.mean.filter((x) => x !== null), bad = line.bad.reduce((sum, span) => sum + span[2], 0);
      const ends = known.length ? `first ${number(known[0])}, last ${number(known[known.length - 1])}` : "no finite value";
      return `${data.arms[line.arm]}: ${ends}${bad ? `, ${bad} of ${line.count} not finite from step ${line.bad[0][0]}` : ""}`;
    });
    return `${chart.title} by step. ${said.join(". ")}`;
  }

  /* -- what is known of a step, for the line of numbers under the cursor ----------------------------------------------------- */

  function at(step, chart) {
    return chart.lines.filter((line) => !hidden.has(line.arm)).map((line) => [line.arm, told(line, step)]);
  }

  function told(line, step) {
    let best = 0;
    line.x.forEach((x, i) => { if (Math.abs(middle(x) - step) < Math.abs(middle(line.x[best]) - step)) best = i; });
    const end = line.x.length > 1 ? line.x[line.x.length - 1] - line.x[line.x.length - 2] : data.width;
    if (step > line.x[line.x.length - 1] + data.width + end / 2) return "\u2013"; // it had ended
    const [from, to] = [line.x[best], line.x[best] + data.width - 1];
    const bad = line.bad.filter(([first, last]) => first <= to && last >= from).map((span) => span[3]);
    const mean = line.mean[best];
    if (mean === null) return bad[0] || "not finite";
    const range = data.arms.length <= 4 && line.low && line.low[best] !== line.high[best] ? ` (${number(line.low[best])} to ${number(line.high[best])})` : "";
    return `${number(mean)}${range}${bad.length ? `, ${bad[0]}` : ""}`;
  }

  /* -- zoom ---------------------------------------------------------------------------------------------------------------- */

  function setView(min, max) {
    const span = Math.max(max - min, Math.min(4, full.max - full.min));
    view.min = Math.max(full.min, Math.min(min, full.max - span));
    view.max = Math.min(full.max, view.min + span);
    for (const plot of all) plot.setScale("x", { min: view.min, max: view.max });
    Page.viewChanged(zoomed());
  }
  const reset = () => setView(full.min, full.max);
  const zoom = (factor, about = (view.min + view.max) / 2) => setView(about - (about - view.min) * factor, about + (view.max - about) * factor);
  const pan = (share) => { const d = (view.max - view.min) * share; setView(view.min + d, view.max + d); };

  function takeData(given) {
    data = given;
    let min = Infinity, max = -Infinity;
    for (const { lines } of data.charts) {
      for (const { x, bad } of lines) {
        for (const step of [...x, ...x.map((one) => one + data.width - 1), ...bad.flatMap(([a, b]) => [a, b])]) {
          if (step < min) min = step;
          if (step > max) max = step;
        }
      }
    }
    for (const step of data.marks.flat()) { if (step < min) min = step; if (step > max) max = step; }
    if (min > max) { min = 0; max = 1; }
    full.min = view.min = min - 0.5; full.max = view.max = max + 0.5;
  }

  function toggle(arm) { if (hidden.has(arm)) hidden.delete(arm); else hidden.add(arm); draw(); }
  function only(arm) { hidden.clear(); data.arms.forEach((_, i) => { if (i !== arm) hidden.add(i); }); draw(); }
  function everyArm() { hidden.clear(); draw(); }
  function logAll() {
    const wanted = ![...logs.values()].some(Boolean);
    for (const { key } of data.charts) logs.set(key, wanted);
    draw();
  }
  function choose(step) { marked = step; redraw(); }

  function resize() {
    for (const plot of all) {
      const width = plot.root.parentElement.clientWidth;
      if (width > 0 && width !== plot.width) plot.setSize({ width, height: plot.height });
    }
  }

  const redraw = () => all.forEach((plot) => plot.redraw(false));
  return { all, view, full, colours, hidden, logs, number, narrow, readColours, takeData, draw, redraw, setView, reset, zoom, pan, choose, toggle, only, everyArm, logAll, at, resize };
})();
