/* The terms of the loss: a line each under the chart of the loss, with its steps, cursor and zoom. Where a term was NaN or Inf there is
   no point to draw, so crosses stand under the chart, a row a term: the first of them is where it began. */
"use strict";
const Terms = (() => {
  const { text: number, drawable } = Numbers;
  const LANE = 9, TOP = 14; // the first row is clear of the lowest number of the axis
  const ORDER = [0, 2, 4, 3, 1, 5]; // colours that are far from those of marks first
  const hidden = new Set(); // by name: new data of a live page does not show them again
  let terms = null, log = null, plot = null, detailed = false, list = [];

  const place = (i) => ORDER[i % ORDER.length] + Lines.COLOURS * Math.floor(i / ORDER.length);
  const colour = (i) => Plots.colours[`arm-${place(i) % Lines.COLOURS}`];
  const shown = () => terms.lines.map((_, i) => i).filter((i) => !hidden.has(terms.lines[i].name));
  const values = () => shown().flatMap((i) => [...(terms.lines[i].low || terms.lines[i].mean), ...(terms.lines[i].high || [])]).filter((x) => x !== null);
  const wantsDetail = () => Boolean(terms.near) && Plots.view.max - Plots.view.min < 96 * terms.width;

  /* -- data ---------------------------------------------------------------------------------------------------------------- */

  /* The buckets, with the steps around incidents in their place where one is zoomed in. */
  function points() {
    const found = [], inside = new Set();
    if (detailed) terms.near.steps.forEach((step, i) => { found.push({ x: step, near: i }); inside.add(Math.floor(step / terms.width)); });
    terms.steps.forEach((step, i) => {
      if (!inside.has(Math.floor(step / terms.width))) found.push({ x: step + (terms.width - 1) / 2, bucket: i });
    });
    return found.sort((a, b) => a.x - b.x);
  }

  function value(i, point, which) {
    if (point.near !== undefined) return terms.near.values[i][point.near];
    return (terms.lines[i][which] || terms.lines[i].mean)[point.bucket];
  }

  function bad(i, point) {
    if (point.near !== undefined) return terms.near.bad[i].includes(point.near) ? 1 : 0;
    return terms.lines[i].bad.length ? terms.lines[i].bad[point.bucket] : 0;
  }

  /* A term that a step did not have is no gap in its line; NaN is one. */
  function columns(axis) {
    const column = (i, which) => list.map((point) => {
      const x = drawable(value(i, point, which), axis.how === "log");
      return x !== null ? axis.to(x) : bad(i, point) ? null : undefined;
    });
    const each = shown().flatMap((i) => (terms.width > 1 ? [column(i, "high"), column(i, "low"), column(i, "mean")] : [column(i, "mean")]));
    return [list.map((point) => point.x), ...(each.length ? each : [list.map(() => null)])];
  }

  /* First and last step of every row of points that are not finite. */
  function spans(i) {
    const found = [];
    let open = null;
    for (const point of list) {
      const known = value(i, point, "mean") !== null;
      if (bad(i, point)) {
        if (open) open[1] = point.x; else found.push(open = [point.x, point.x]);
      }
      if (known) open = null;
    }
    return found;
  }

  /* -- drawing ------------------------------------------------------------------------------------------------------------- */

  function drawLanes(lanes) {
    return (u) => {
      const { ctx, bbox } = u, p = uPlot.pxRatio, y = (lane) => bbox.top + bbox.height + lane.below * p;
      ctx.save();
      ctx.setLineDash([]); // the last line's own is still set
      if (lanes.length) {
        ctx.font = `${(Plots.narrow() ? 9 : 11) * p}px system-ui, sans-serif`;
        ctx.fillStyle = Plots.colours.soft;
        ctx.textAlign = "right";
        ctx.textBaseline = "middle";
        ctx.fillText("NaN, Inf", bbox.left - 8 * p, (y(lanes[0]) + y(lanes[lanes.length - 1])) / 2);
      }
      for (const lane of lanes) {
        for (const [first, last] of spans(lane.term)) {
          if (last >= Plots.view.min && first <= Plots.view.max) Shapes.span(u, first, last, y(lane), colour(lane.term));
        }
      }
      ctx.restore();
    };
  }

  function seriesOf(i) {
    const none = { stroke: "transparent", width: 0, points: { show: false } }, stroke = () => colour(i);
    const mean = { stroke, width: 1.5, dash: Lines.dash(place(i)), points: { size: 4, fill: stroke } };
    return terms.width > 1 ? [none, none, mean] : [mean];
  }

  /* A button a term, with its newest value: pressed, it is drawn. */
  function legend() {
    const told = terms.lines.map(({ name, last }, i) => {
      const value = last === null ? "" : Dom.h("b", typeof last === "string" ? { class: "nonfinite" } : {}, number(last));
      const button = Dom.h("button", { type: "button", id: `term-${i}`, "aria-pressed": String(!hidden.has(name)), title: "on or off" }, Lines.swatch(place(i)), Dom.h("bdi", {}, name), value);
      button.addEventListener("click", () => {
        if (!hidden.delete(name)) hidden.add(name);
        Plots.draw();
        document.getElementById(`term-${i}`).focus({ preventScroll: true });
      });
      return button;
    });
    const more = terms.more ? Dom.h("span", {}, "There are more; the first ones are shown.") : "";
    return Dom.h("div", { class: "terms-legend", role: "group", "aria-label": "Terms that are drawn" }, ...told, more);
  }

  function label() {
    const said = shown().map((i) => {
      const { name, mean, bad: counts } = terms.lines[i], known = mean.filter((x) => x !== null);
      const ends = known.length ? `first ${number(known[0])}, last ${number(known[known.length - 1])}` : "no finite value";
      const from = counts.findIndex(Boolean), count = counts.reduce((sum, n) => sum + n, 0);
      return `${name}: ${ends}${count ? `, ${count} not finite from step ${terms.steps[from]}` : ""}`;
    });
    return `Loss terms by step. ${said.join(". ")}`;
  }

  function draw(given) {
    terms = given;
    detailed = wantsDetail();
    list = points();
    const known = values(), axis = Axes.of(known, log === null ? known.length && Axes.spread(known) : log);
    const lanes = shown().filter((i) => terms.lines[i].bad.some(Boolean)).map((term, row) => ({ term, below: TOP + row * LANE }));
    const room = lanes.length ? lanes[lanes.length - 1].below + 5 : 0;
    const button = Plots.logButton("log-terms", axis, () => { log = !Axes.isLog(axis); });
    const figure = Dom.h("figure", { id: "plot-terms" }, Dom.h("figcaption", {}, "Loss terms", Plots.narrow() ? "" : Dom.h("br"), button));
    document.getElementById("plots").append(figure);
    const banded = terms.width > 1, fill = (i) => () => `${colour(i)}${shown().length > 4 ? "10" : "26"}`;
    plot = Plots.add(figure, label(), Plots.options(190, {
      height: 190 + 16 + room, padding: [8, Plots.narrow() ? 14 : 26, 8 + room, 0],
      yScale: axis.scale,
      y: { values: (u, at) => at.map((y) => number(axis.from(y))), ...axis.ticks },
      series: [{}, ...(shown().length ? shown().flatMap(seriesOf) : [{ points: { show: false } }])],
      bands: banded ? shown().map((i, k) => ({ series: [3 * k + 1, 3 * k + 2], fill: fill(i) })) : [],
      hooks: { draw: [Plots.drawMarks, drawLanes(lanes)] },
    }, false), columns(axis));
    Object.assign(plot, { how: axis.how, told, lanes });
    plot.zoomed = () => {
      if (wantsDetail() === detailed) return;
      detailed = !detailed;
      list = points();
      plot.setData(columns(axis), false);
    };
    figure.append(legend());
  }

  /* -- what is known of a step, for the line of numbers under the cursor ----------------------------------------------------- */

  function told(step) {
    const found = list.reduce((best, point) => (Math.abs(point.x - step) < Math.abs(best.x - step) ? point : best), list[0]);
    return shown().map((i) => {
      const mean = value(i, found, "mean"), count = bad(i, found);
      return [terms.lines[i].name, mean === null ? (count ? "non-finite" : "\u2013") : `${number(mean)}${count ? `, ${count} non-finite` : ""}`];
    });
  }

  function setLog(wanted) { log = wanted; }

  return { draw, setLog };
})();
