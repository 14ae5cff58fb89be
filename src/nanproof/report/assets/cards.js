/* Incidents: one card each, with what is known of it and the command that runs the step again. */
"use strict";
const Cards = (() => {
  const { h, text } = Dom;
  const cards = new Map(); // number: {element, told}
  let data = null;

  const DONE = { skipped: "step refused", clipped: "clipped and taken", rewound: "went back (copy in memory)", "rolled-back": "went back (checkpoint)", halted: "run halted", recorded: "recorded only" };

  function samples(list) {
    return list.flatMap((sample) => [
      h("h3", {}, `Sample ${sample.sample} of the batch`),
      ...sample.tensors.map((tensor) => h("div", {},
        h("div", { class: "soft" }, h("code", {}, text(tensor.name)), ` ${tensor.dtype} [${tensor.shape.join(", ")}] `),
        tensor.ids ? tokens(tensor) : numbers(tensor))),
      hint(sample.tensors) ? h("p", { class: "soft" }, hint(sample.tensors)) : "",
    ]);
  }

  const hint = (tensors) => (tensors.find((tensor) => tensor.hint) || { hint: "" }).hint;

  /* Ids in a row, each with its text; many of the same are told as one. */
  function tokens(tensor) {
    const guilty = new Set(tensor.bad);
    const end = tensor.start + tensor.ids.length;
    const box = h("div", { class: "tokens mono" }, tensor.start ? `\u2026 from ${tensor.start}` : "");
    tensor.ids.forEach((id, i) => {
      const bad = guilty.has(tensor.start + i), said = tensor.texts.length ? tensor.texts[i] : "";
      const same = (place) => !guilty.has(tensor.start + place) && tensor.ids[place] === id;
      if (!bad && same(i - 1) && same(i - 2) && same(i - 3)) { // the fourth of the same and those after it
        if (!same(i + 1)) box.append("\u2026 and on to place " + (tensor.start + i));
        return;
      }
      box.append(h("span", { class: bad ? "guilty" : "", title: `place ${tensor.start + i}, id ${id}` }, h("bdi", {}, said || String(id)), said ? h("small", {}, String(id)) : "", bad ? h("small", {}, "guilty") : ""));
    });
    if (end < tensor.shape[0]) box.append(`\u2026 ${tensor.shape[0] - end} more`);
    return box;
  }

  function numbers(tensor) {
    const range = tensor.min === undefined ? "no finite number" : `${Plots.number(tensor.min)} to ${Plots.number(tensor.max)}, mean ${Plots.number(tensor.mean)}`;
    const of = tensor.read < tensor.count ? ` of the first ${tensor.read.toLocaleString("en")}` : "";
    return h("p", { class: "mono" }, tensor.nonfinite ? h("b", {}, `${tensor.nonfinite.toLocaleString("en")} of ${tensor.read.toLocaleString("en")} are NaN or Inf; `) : "",
      `${range}${of}; from ${tensor.start}: ${tensor.values.map(Plots.number).join(", ")}${tensor.start + tensor.values.length < tensor.count ? ", \u2026" : ""}`);
  }

  function command(said) {
    const pre = h("pre", {}, said);
    const button = h("button", { type: "button" }, "copy");
    button.addEventListener("click", async () => {
      getSelection().selectAllChildren(pre);
      try { await navigator.clipboard.writeText(said); } catch { document.execCommand("copy"); }
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    return h("div", { class: "command" }, pre, button);
  }

  function body(card) {
    const parts = [];
    const add = (title, ...children) => parts.push(h("h3", {}, title), ...children);
    const known = card.diagnosis;
    add("What happened", h("p", { dir: "auto" }, text(card.message)),
      h("p", { class: "soft" }, `Loss ${Plots.number(card.loss)}, gradient norm ${Plots.number(card.grad_norm)}` + (card.rank === null ? "" : `, rank ${card.rank}`) + (card.micro_batch === null ? "" : `, micro-batch ${card.micro_batch}`) + "."));
    if (known) {
      add("Why", h("p", {}, h("b", {}, text(known.cause)), known.why ? `: ${known.why} ` : " ", h("span", { class: "soft" }, `Confidence ${Plots.number(known.confidence)}.`)));
      if (known.place) add("Where", h("p", { dir: "auto" }, text(known.place), known.source ? h("br") : "", known.source ? h("code", {}, text(known.source)) : ""));
      if (known.evidence.length) add("Evidence", h("ul", {}, ...known.evidence.map((said) => h("li", { dir: "auto" }, text(said)))));
      if (known.fix) add("Fix", h("p", { class: "fix", dir: "auto" }, text(known.fix)), h("p", { class: "soft" }, known.verified ? "Verified: the step was run again with this change, and it held." : "Not verified: it follows from the cause and was not tried on the step."));
      if (known.alternatives.length) add("Or else", h("p", {}, text(known.alternatives.join(", "))));
    } else {
      add("Why", h("p", {}, card.like ? h("a", { href: `#incident-${card.like}` }, `Not examined on its own; incident ${card.like} is of the same kind and was.`) : "Not examined."));
    }
    if (card.culprits.length) {
      add("Gradients to blame", h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", {}, "parameter"), h("th", { class: "num" }, "norm"))),
        h("tbody", {}, ...card.culprits.map(([name, norm]) => h("tr", {}, h("td", {}, h("code", {}, text(name, 90))), h("td", { class: "num" }, Plots.number(norm))))))), card.more_culprits ? h("p", { class: "soft" }, `and ${card.more_culprits} more`) : "");
    }
    parts.push(...samples(card.samples));
    if (card.command) add("Run it again", command(card.command), h("p", { class: "soft" }, "train:build stands for a function of yours that returns model and loss_fn."));
    else if (card.bundle === "gone") add("Run it again", h("p", { class: "soft" }, "Its bundle is not in the run's folder any more: the newest are kept."));
    const show = h("button", { type: "button" }, "Show in the curves");
    show.addEventListener("click", () => { Plots.setView(card.step - 50, card.step + 50); Plots.choose(card.number); document.getElementById("curves").scrollIntoView(); });
    parts.push(h("p", {}), show);
    return h("div", { class: "body" }, ...parts.filter(Boolean));
  }

  function make(card) {
    const known = card.diagnosis;
    const element = h("details", { id: `incident-${card.number}` },
      h("summary", {}, h("span", { class: "step" }, `Step ${card.step.toLocaleString("en")}`), h("span", { class: "kind" }, known && known.cause !== "unknown" ? text(known.cause) : card.kind),
        h("span", { class: "act" }, `${known && known.cause !== "unknown" ? `${card.kind}, ` : ""}${DONE[card.action] || card.action}`),
        known && known.cause !== "unknown" ? h("span", { class: `tag ${known.verified ? "yes" : "no"}` }, known.verified ? "fix verified" : "fix not verified") : ""));
    element.addEventListener("toggle", () => {
      if (!element.open) return;
      fill(cards.get(card.number));
      Plots.choose(card.number);
    });
    return element;
  }

  /* What is in a card is made when it is first opened. */
  function fill(there) {
    if (there.element.children.length < 2) there.element.append(body(there.card));
  }

  function update(given) {
    data = given;
    const parent = document.getElementById("cards");
    for (const card of data.incidents) {
      const told = JSON.stringify(card), there = cards.get(card.number);
      if (there && there.told === told) continue;
      if (there) { // what is open stays open
        there.card = card; there.told = told;
        if (there.element.children.length > 1) there.element.lastChild.replaceWith(body(card));
      } else {
        cards.set(card.number, { card, told, element: make(card) });
        parent.append(cards.get(card.number).element);
      }
    }
    document.getElementById("no-cards").hidden = data.all_incidents > 0;
    document.getElementById("more-cards").textContent = data.all_incidents > cards.size ? `${(data.all_incidents - cards.size).toLocaleString("en")} more are in incidents.jsonl; shown are the first of each cause and the newest.` : "";
  }

  function open(number, scroll) {
    const there = cards.get(number) || [...cards].filter(([other]) => other >= number).map((pair) => pair[1])[0];
    if (!there) return;
    fill(there);
    there.element.open = true;
    Plots.choose(number);
    if (scroll) { there.element.scrollIntoView({ block: "start" }); there.element.firstChild.focus({ preventScroll: true }); }
  }

  /* The next or the previous card, counted from the one that was opened last. */
  let current = 0;
  function step(by) {
    const numbers = [...cards.keys()];
    if (!numbers.length) return;
    const place = numbers.indexOf(current);
    current = numbers[place < 0 ? (by > 0 ? 0 : numbers.length - 1) : Math.max(0, Math.min(numbers.length - 1, place + by))];
    open(current, true);
  }

  return { update, open, step };
})();
