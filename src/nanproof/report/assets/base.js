/* What the other files share: making elements (text is only ever set as text), numbers and axes, colours of lines, signs on a canvas,
   fingers on a plot. */
"use strict";
const Dom = {
  h(tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
    element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
    return element;
  },
  /* Text from a file, kept apart from the direction of what is around it; a long one is cut until it is asked for. */
  text(said, most = 320) {
    const box = Dom.h("bdi", {}, said.length > most + 40 ? `${said.slice(0, most)}\u2026 ` : said);
    if (said.length > most + 40) {
      const more = Dom.h("button", { type: "button", class: "more" }, "show all");
      more.addEventListener("click", () => box.replaceChildren(said));
      box.append(more);
    }
    return box;
  },
};

const Numbers = {
  text(x) {
    if (x === null || x === undefined) return "\u2013";
    if (typeof x === "string" || x === 0) return String(x);
    const size = Math.abs(x);
    return size < 1e-3 || size >= 1e5 ? x.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e") : String(+x.toPrecision(4));
  },
  /* What a plot can be drawn of: axes of more than a hundred decades have no end of ticks. The cursor tells the number itself. */
  drawable(x, positive) {
    if (x === null || (positive && x < 1e-60)) return null;
    return Math.abs(x) < 1e-60 ? 0 : Math.max(-1e60, Math.min(1e60, x));
  },
  /* Ticks of an axis that is not linear: powers of its base, no more than there is room for, and 2 and 5 between few tens; round
     numbers where there are none of these, between 2.1 and 4.9. */
  powers(base, low, high) {
    const logs = Math.log(high / low) / Math.log(base), every = Math.max(1, Math.ceil(logs / 5));
    const leads = base === 10 && logs < 2.1 ? [1, 2, 5] : [1], found = [];
    for (let power = Math.floor(Math.log(low) / Math.log(base) / every) * every; base ** power <= high; power += every) {
      for (const lead of leads) if (lead * base ** power >= low && lead * base ** power <= high) found.push(lead * base ** power);
    }
    return base === 10 && found.length < 2 && high / low > 1.2 ? Numbers.round(low, high) : found;
  },
  /* Three to six round numbers. */
  round(low, high) {
    const raw = (high - low) / 4, unit = 10 ** Math.floor(Math.log10(raw)), apart = unit * [1, 2, 5, 10].find((lead) => lead * unit >= raw * 0.999);
    return Array.from({ length: 6 }, (_, i) => (Math.ceil(low / apart) + i) * apart).filter((x) => x <= high);
  },
};

/* The y axis of a chart: how a value becomes a height and a height a value, its range and its ticks. uPlot gets heights and a plain
   axis, as its own have no ticks above 1e32. */
const Axes = {
  /* Whether values lie decades apart. */
  spread(values) {
    const low = Math.min(...values), high = Math.max(...values);
    return low > 0 ? high / low > 1e3 : Math.max(high, -low) > 1e4;
  },
  of(values, log) {
    const known = values.map((x) => Numbers.drawable(x)), same = (x) => x, plain = { to: same, from: same, scale: {}, ticks: {} };
    if (!known.length) return { ...plain, how: "none", scale: { range: [0, 1] }, ticks: { values: (u, at) => at.map(() => "") } };
    const sizes = known.map(Math.abs).filter((x) => x > 0).sort((a, b) => a - b), low = Math.min(...known), high = Math.max(...known);
    const most = sizes.length ? sizes[sizes.length - 1] : 0;
    const filter = (u, at) => at; // uPlot's own would leave some out
    if (!log || !sizes.length) {
      const unit = most > 1e12 || (most > 0 && most < 1e-9) ? 10 ** Math.floor(Math.log10(most)) : 1;
      const flat = (y) => (y ? [y - Math.abs(y), y + Math.abs(y)] : [-1, 1]); // one that never moves
      const range = (u, a, b) => (a === null || a === b ? flat(a) : [a - 0.05 * (b - a), b + 0.05 * (b - a)]);
      const own = unit === 1 ? {} : { scale: { range }, ticks: { filter, splits: (u, axis, a, b) => Numbers.round(a, b) } }; // uPlot's end at 1e-16
      return { ...plain, how: "linear", to: (x) => x / unit, from: (y) => y * unit, ...own, ...(low === high ? { scale: { range: flat(low / unit) } } : {}) };
    }
    if (low > 0) {
      const range = (u, from, to) => (from === null ? [Math.log10(low), Math.log10(high) + 0.1] : [from - 0.1, to + 0.1]); // of what is in view
      const splits = (u, axis, from, to) => Numbers.powers(10, 10 ** from, 10 ** to).map(Math.log10);
      return { how: "log", to: (x) => (x > 0 ? Math.log10(x) : null), from: (y) => 10 ** y, scale: { range }, ticks: { filter, splits } };
    }
    /* Zeros and negative values are drawn too: below the size that nearly all others have it is linear. One that is far smaller than
       the rest, or far larger, does not press the others together. */
    const least = sizes[Math.floor(sizes.length / 20)], to = (x) => Math.asinh(x / least), from = (y) => Math.sinh(y) * least;
    const range = (u, bottom, top) => {
      const [a, b] = bottom === null ? [to(low), to(high)] : [bottom, top], room = Math.max(0.2, 0.02 * (b - a));
      return a === b ? [a - 1, b + 1] : [a === 0 ? 0 : a - room, b === 0 ? 0 : b + room];
    };
    const splits = (u, axis, bottom, top) => Axes.bothSides(from(bottom), from(top), least, (x) => Math.abs(to(x)) > 0.08 * (top - bottom)).map(to);
    return { how: "asinh", to, from, scale: { range }, ticks: { filter, splits } };
  },
  /* Ticks from one size to another on either side of zero, and zero; those that would stand on it are left out. */
  bothSides(low, high, least, clear) {
    const side = (a, b) => (b > least ? Numbers.powers(10, Math.max(a, least), b) : []), zero = low <= 0 && high >= 0;
    const found = [...side(-high, -low).map((x) => -x).reverse(), ...side(low, high)].filter((x) => !zero || clear(x));
    const all = zero ? [...found.filter((x) => x < 0), 0, ...found.filter((x) => x > 0)] : found;
    return all.length > 1 ? all : Numbers.round(low, high);
  },
  isLog: ({ how }) => how === "log" || how === "asinh",
};

/* Lines of one chart: six colours, dashes for the next six, dots after that. */
const Lines = {
  COLOURS: 6,
  DASHES: [[], [6, 4], [2, 3]],
  dash: (place) => Lines.DASHES[Math.floor(place / Lines.COLOURS) % Lines.DASHES.length],
  swatch: (place) => Dom.h("span", { class: `swatch arm-${place % Lines.COLOURS} turn-${Math.floor(place / Lines.COLOURS) % 3}` }),
  readColours(style, colours) {
    for (let i = 0; i < Lines.COLOURS; i++) colours[`arm-${i}`] = style.getPropertyValue(`--arm-${i}`).trim();
  },
};

const Shapes = {
  /* Strokes through lists of points, in pixels around (x, y); one that is solid is filled. */
  draw(ctx, x, y, colour, strokes, { solid = false, width = 1.5 } = {}) {
    const p = uPlot.pxRatio;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = width * p;
    ctx.beginPath();
    for (const stroke of strokes) stroke.forEach(([dx, dy], i) => ctx[i ? "lineTo" : "moveTo"](x + dx * p, y + dy * p));
    if (solid) ctx.fill(); else ctx.stroke();
    ctx.restore();
  },
  cross: (ctx, x, y, colour) => Shapes.draw(ctx, x, y, colour, [[[-3, -3], [3, 3]], [[-3, 3], [3, -3]]]),
  /* Values in a row that are not finite: a bar with a cross at either end. */
  span(u, first, last, y, colour) {
    const { left, width } = u.bbox, at = (x) => Math.max(left, Math.min(left + width, u.valToPos(x, "x", true)));
    const [from, to] = [at(first), at(last)], p = uPlot.pxRatio;
    if (to - from > 3 * p) Shapes.draw(u.ctx, from, y, colour, [[[0, 0], [(to - from) / p, 0]]], { width: 2.5 });
    for (const end of new Set([from, to])) Shapes.cross(u.ctx, end, y, colour);
  },
  triangle: (ctx, x, y, colour) => Shapes.draw(ctx, x, y, colour, [[[0, -5], [5, 4], [-5, 4], [0, -5]]]),
  tick: (ctx, x, y, colour, share) =>
    Shapes.draw(ctx, x, y, colour, [[[0, 4 - 8 * Math.max(0.2, Math.min(1, share))], [0, 4]]], { width: 1 }),
  diamond(ctx, x, y, colour, large) {
    const r = large ? 8 : 5.5;
    Shapes.draw(ctx, x, y, colour, [[[0, -r], [r, 0], [0, r], [-r, 0]]], { solid: true });
  },
  /* From where the run was to where it went back to. */
  arrow(u, from, to, y, colour) {
    const { left, width } = u.bbox;
    if (from < left || to > left + width) return;
    const edge = (x) => Math.max(left, Math.min(left + width, x));
    const length = Math.max(8, (edge(from) - edge(to)) / uPlot.pxRatio);
    Shapes.draw(u.ctx, edge(from), y, colour, [[[0, -4], [0, 0], [-length, 0]], [[4 - length, -4], [-length, 0], [4 - length, 4]]]);
  },
};

/* Two fingers zoom, one moves a zoomed plot sideways; up and down stay the page's own. */
const Touch = {
  listen(plot) {
    let start = null;
    const place = (touch) => touch.clientX - plot.over.getBoundingClientRect().left;
    const begin = (event) => {
      const at = [...event.touches].slice(0, 2).map(place);
      start = { at, min: Plots.view.min, max: Plots.view.max, width: plot.over.clientWidth };
    };
    const move = (event) => {
      if (!start || event.touches.length !== start.at.length) return begin(event);
      const now = [...event.touches].slice(0, 2).map(place);
      const unit = (start.max - start.min) / start.width;
      const value = (x) => start.min + x * unit;
      if (now.length === 2) {
        event.preventDefault();
        const spread = Math.max(20, Math.abs(now[1] - now[0])), scale = Math.max(20, Math.abs(start.at[1] - start.at[0])) / spread;
        const span = (start.max - start.min) * scale, middle = value((start.at[0] + start.at[1]) / 2);
        const min = middle - (((now[0] + now[1]) / 2) / start.width) * span;
        Plots.setView(min, min + span);
      } else if (Math.abs(now[0] - start.at[0]) > 6) {
        const d = (start.at[0] - now[0]) * unit;
        Plots.setView(start.min + d, start.max + d);
      }
    };
    plot.over.addEventListener("touchstart", begin, { passive: true });
    plot.over.addEventListener("touchmove", move, { passive: false });
    plot.over.addEventListener("touchend", () => { start = null; }, { passive: true });
  },
};
