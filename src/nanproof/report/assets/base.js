/* What the other files share: making elements (text is only ever set as text), signs on a canvas, fingers on a plot. */
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

const Shapes = {
  draw(ctx, colour, hollow, path) {
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = colour;
    ctx.lineWidth = 1.5 * uPlot.pxRatio;
    ctx.beginPath();
    path(uPlot.pxRatio);
    if (hollow) ctx.stroke(); else ctx.fill();
    ctx.restore();
  },
  cross: (ctx, x, y, colour) => Shapes.draw(ctx, colour, true, (p) => { const r = 3 * p; ctx.moveTo(x - r, y - r); ctx.lineTo(x + r, y + r); ctx.moveTo(x - r, y + r); ctx.lineTo(x + r, y - r); }),
  tick: (ctx, x, y, colour, share) => Shapes.draw(ctx, colour, true, (p) => { ctx.lineWidth = p; ctx.moveTo(x, y + (4 - 8 * Math.max(0.2, Math.min(1, share))) * p); ctx.lineTo(x, y + 4 * p); }),
  diamond: (ctx, x, y, colour, large) => Shapes.draw(ctx, colour, false, (p) => { const r = (large ? 8 : 5.5) * p; ctx.moveTo(x, y - r); ctx.lineTo(x + r, y); ctx.lineTo(x, y + r); ctx.lineTo(x - r, y); }),
  triangle: (ctx, x, y, colour) => Shapes.draw(ctx, colour, true, (p) => { const r = 5 * p; ctx.moveTo(x, y - r); ctx.lineTo(x + r, y + r); ctx.lineTo(x - r, y + r); ctx.closePath(); }),
  arrow: (u, from, to, y, colour) => Shapes.draw(u.ctx, colour, true, (p) => {
    const { ctx, bbox } = u, edge = (x) => Math.max(bbox.left, Math.min(bbox.left + bbox.width, x)), end = Math.min(edge(to), edge(from) - 8 * p);
    if (to > bbox.left + bbox.width || from < bbox.left) return;
    ctx.moveTo(edge(from), y - 4 * p); ctx.lineTo(edge(from), y); ctx.lineTo(end, y); ctx.moveTo(end + 4 * p, y - 4 * p); ctx.lineTo(end, y); ctx.lineTo(end + 4 * p, y + 4 * p);
  }),
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
