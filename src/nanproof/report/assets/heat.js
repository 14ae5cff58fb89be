/* Heat maps: a row a parameter or module, a column a few steps, drawn onto the canvas of a uPlot with the same x axis as the curves. */
"use strict";
const Heat = (() => {
  /* Cividis: even steps of lightness, and the same for those who do not tell red from green. */
  const STOPS = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"];
  const TABLE = (() => {
    const rgb = STOPS.map((stop) => [1, 3, 5].map((i) => parseInt(stop.slice(i, i + 2), 16)));
    return Array.from({ length: 256 }, (_, i) => {
      const place = (i / 255) * (rgb.length - 1), first = Math.min(Math.floor(place), rgb.length - 2), share = place - first;
      return rgb[first].map((x, k) => Math.round(x + (rgb[first + 1][k] - x) * share));
    });
  })();
  const ABSENT = 0, ZERO = 1, NONFINITE = 65535;

  function unpack(text) {
    const bytes = atob(text);
    const codes = new Uint16Array(bytes.length / 2);
    for (let i = 0; i < codes.length; i++) codes[i] = bytes.charCodeAt(2 * i) | (bytes.charCodeAt(2 * i + 1) << 8);
    return codes;
  }

  const logOf = (map, code) => map.low + ((code - 2) / 65532) * (map.high - map.low);

  /* One pixel a cell; uPlot's canvas stretches it. */
  function picture(map, codes, rows) {
    const canvas = document.createElement("canvas");
    canvas.width = map.steps.length; canvas.height = rows;
    const context = canvas.getContext("2d");
    const image = context.createImageData(canvas.width, rows);
    const broken = [];
    for (let column = 0; column < canvas.width; column++) {
      for (let row = 0; row < rows; row++) {
        const code = codes[column * rows + row];
        if (code === NONFINITE) broken.push([column, row]);
        if (code === ABSENT || code === NONFINITE) continue;
        const share = code === ZERO ? 0 : (logOf(map, code) - map.from) / Math.max(map.to - map.from, 1e-9);
        const [r, g, b] = TABLE[Math.max(0, Math.min(255, Math.round(share * 255)))];
        image.data.set([r, g, b, 255], 4 * (row * canvas.width + column));
      }
    }
    context.putImageData(image, 0, 0);
    return { canvas, broken };
  }

  function paint(u, map, rows, made) {
    const { ctx, bbox } = u;
    const left = (column) => u.valToPos(map.steps[column] - 0.5, "x", true);
    const top = (row) => u.valToPos(row, "y", true);
    const high = top(1) - top(0);
    ctx.save();
    ctx.beginPath(); ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height); ctx.clip();
    ctx.imageSmoothingEnabled = false;
    const unit = u.valToPos(map.steps[0] - 0.5 + map.width, "x", true) - left(0);
    for (let column = 0; column < map.steps.length; column++) { // columns may have gaps between them, where no step was taken
      const x = left(column);
      if (x + unit < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.drawImage(made.canvas, column, 0, 1, rows, Math.floor(x), bbox.top, Math.ceil(unit) + 1, bbox.height);
    }
    for (const [column, row] of made.broken) {
      const x = left(column), width = Math.max(unit, 3 * uPlot.pxRatio), y = top(row);
      if (x + width < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.fillStyle = Plots.colours.broken;
      ctx.fillRect(x, y, width, high);
      ctx.strokeStyle = "#ffffff"; ctx.lineWidth = uPlot.pxRatio; // a stroke through it: not by colour alone
      ctx.beginPath(); ctx.moveTo(x, y + high); ctx.lineTo(x + width, y); ctx.stroke();
    }
    ctx.restore();
    Plots.drawMarks(u);
  }

  /* The end of a name says most; of what comes before, the number of the layer. */
  function short(name, room) {
    const parts = name.split("."), layer = parts.findIndex((part) => /^\d+$/.test(part));
    const tail = name.length > room && layer > 0 ? parts.slice(layer).join(".") : name;
    return tail.length <= room ? tail : `\u2026${tail.slice(1 - room)}`;
  }

  /* `missing`: what an empty cell means. */
  function one(parent, id, title, what, missing, map) {
    const rows = map.names.length;
    const codes = unpack(map.cells);
    const each = Math.max(6, Math.min(16, Math.round(560 / rows)));
    const made = picture(map, codes, rows);
    const note = map.grouped ? `${map.all} of them in ${rows} rows, the largest of each module` : `${rows} rows`;
    const figure = Dom.h("figure", { id, class: "wide" }, Dom.h("figcaption", {}, title, " ", Dom.h("small", {}, note)));
    const label = `${title}: a heat map of ${rows} rows by step. ${made.broken.length} cells are non-finite.`;
    parent.append(figure);
    const room = Plots.narrow() ? 0 : 23, every = Math.ceil(12 / each);
    const plot = Plots.add(figure, label, Plots.options(rows * each, {
      yScale: { range: [0, rows], dir: -1 },
      y: {
        splits: () => map.names.map((_, i) => i + 0.5).filter((_, i) => i % every === 0), grid: { show: false },
        values: (u, at) => at.map((y) => (room ? short(map.names[Math.floor(y)], room) : "")), font: "10px ui-monospace, monospace",
      },
      series: [{}, { paths: () => null, points: { show: false } }],
      hooks: { draw: [(u) => paint(u, map, rows, made)] },
    }, true), [[Plots.full.min, Plots.full.max], [null, null]]);
    plot.refresh = () => plot.setData([[Plots.full.min, Plots.full.max], [null, null]], false);
    plot.cell = (step, top) => {
      const row = Math.floor(plot.posToVal(top, "y"));
      let column = -1;
      map.steps.forEach((start, i) => { if (start <= step) column = i; });
      if (row < 0 || row >= rows || column < 0 || step >= map.steps[column] + map.width) return null;
      const code = codes[column * rows + row];
      const value = code === ABSENT ? missing : code === ZERO ? "0" : code === NONFINITE ? "non-finite" : Plots.number(10 ** logOf(map, code));
      return { name: map.names[row], what, value };
    };
    figure.append(legend(map, made.broken.length, missing));
  }

  function legend(map, broken, missing) {
    const ramp = Dom.h("canvas", { width: 120, height: 10 });
    const context = ramp.getContext("2d");
    TABLE.forEach(([r, g, b], i) => { context.fillStyle = `rgb(${r},${g},${b})`; context.fillRect((i * 120) / 256, 0, 1, 10); });
    const parts = [Dom.h("span", {}, `${Plots.number(10 ** map.from)} `, ramp, ` ${Plots.number(10 ** map.to)}`)];
    if (broken) {
      const sample = Dom.h("canvas", { width: 14, height: 10 }), brush = sample.getContext("2d");
      brush.fillStyle = Plots.colours.broken; brush.fillRect(0, 0, 14, 10);
      brush.strokeStyle = "#ffffff"; brush.beginPath(); brush.moveTo(0, 10); brush.lineTo(14, 0); brush.stroke();
      parts.push(Dom.h("span", {}, sample, "NaN or Inf"));
    }
    if (map.absent) parts.push(Dom.h("span", {}, Dom.h("i", { class: "empty-cell" }), missing));
    return Dom.h("div", { class: "legend" }, ...parts);
  }

  function draw(data) {
    const parent = document.getElementById("heats");
    parent.replaceChildren();
    document.getElementById("heat").hidden = !data.norms && !data.absmax;
    if (data.norms) one(parent, "heat-norms", "Gradient norm of each parameter", "gradient norm", "no gradient", data.norms);
    if (data.absmax) one(parent, "heat-absmax", "Largest output of each module", "largest output", "not called", data.absmax);
  }

  return { draw };
})();
