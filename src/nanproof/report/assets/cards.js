/* Incidents: one card each, with what is known of it and the command that runs the step again. */
"use strict";
const Cards = (() => {
  const { h, text } = Dom;
  const cards = new Map(); // number: {card, told, element, fill}
  let data = null, current = 0;

  const DONE = {
    skipped: "step refused", clipped: "clipped and taken", salvaged: "taken without the bad part of the batch",
    healed: "healed by a verified fix", rewound: "went back (copy in memory)", "rolled-back": "went back (checkpoint)",
    halted: "run halted", recorded: "recorded only",
  };
  const whole = (n) => n.toLocaleString("en");
  const soft = (...said) => h("p", { class: "soft" }, ...said);

  function samples(list) {
    return list.flatMap((sample) => [
      h("p", {}, h("b", {}, `Sample ${sample.sample}`)),
      ...sample.tensors.map((tensor) => h("div", {},
        h("div", { class: "soft" }, h("code", {}, text(tensor.name)), ` ${tensor.dtype} [${tensor.shape.join(", ")}] `),
        tensor.ids ? tokens(tensor) : numbers(tensor))),
      hint(sample.tensors) && soft(hint(sample.tensors)),
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
        if (!same(i + 1)) box.append("\u2026 to place " + (tensor.start + i));
        return;
      }
      const small = (word) => h("small", {}, word);
      box.append(h("span", { class: bad ? "guilty" : "", title: `place ${tensor.start + i}, id ${id}` },
        h("bdi", {}, said || String(id)), said ? small(String(id)) : "", bad ? small("guilty") : ""));
    });
    if (end < tensor.shape[0]) box.append(`\u2026 ${tensor.shape[0] - end} more`);
    return box;
  }

  function numbers({ min, max, mean, read, count, nonfinite, start, values }) {
    const range = min === undefined ? "no finite number" : `${Plots.number(min)} to ${Plots.number(max)}, mean ${Plots.number(mean)}`;
    const part = read < count ? ` of the first ${whole(read)}` : "";
    const list = values.map(Plots.number).join(", ") + (start + values.length < count ? ", \u2026" : "");
    const bad = nonfinite ? h("b", {}, `${whole(nonfinite)} of ${whole(read)} are NaN or Inf; `) : "";
    return h("p", { class: "mono" }, bad, `${range}${part}; from ${start}: ${list}`);
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

  /* Why, where, evidence, fix: as pairs of a heading and what stands under it. */
  function told(known) {
    const verified = known.verified ? "Verified: the step was run again with this change, and it held."
      : "Not verified: it follows from the cause and was not tried on the step.";
    const confidence = h("span", { class: "soft" }, `Confidence ${Plots.number(known.confidence)}.`);
    return [
      ["Why", h("p", {}, h("b", {}, text(known.cause)), known.why ? `: ${known.why} ` : " ", confidence)],
      ["Where", known.place && h("p", { dir: "auto" }, text(known.place)), known.source && h("p", {}, h("code", {}, text(known.source)))],
      ["Evidence", known.evidence.length && h("ul", {}, ...known.evidence.map((said) => h("li", { dir: "auto" }, text(said))))],
      ["Fix", known.fix && h("p", { class: "fix", dir: "auto" }, text(known.fix)), known.fix && soft(verified)],
      ["Or else", known.alternatives.length && h("p", {}, text(known.alternatives.join(", ")))],
    ];
  }

  function table(heads, rows) {
    const head = heads.map(([word, look]) => h("th", { scope: "col", class: look }, word));
    const row = (cells) => h("tr", {}, ...cells.map((cell, i) => h("td", { class: heads[i][1] }, cell)));
    return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, ...head)), h("tbody", {}, ...rows.map(row))));
  }

  function culprits(card) {
    return table([["parameter", ""], ["norm", "num"]], card.culprits.map(([name, norm]) => [h("code", {}, text(name, 90)), Plots.number(norm)]));
  }

  function around(card) {
    const here = (step, said) => (step === card.step ? h("b", {}, said) : said);
    const action = (word) => (word === "skipped" ? "refused" : word === "stepped" ? "taken" : word);
    return table([["step", "num"], ["loss", "num"], ["gradient norm", "num"], ["", ""]],
      card.around.map(([step, loss, norm, word, again]) => [whole(step), Plots.number(loss), Plots.number(norm), text(action(word) + (again ? ", again" : ""))].map((said) => here(step, said))));
  }

  function again(card) {
    if (!card.command) return card.bundle === "gone" ? soft("Its bundle is not in the run's folder any more: the newest are kept.") : "";
    return h("div", {}, command(card.command), soft("train:build stands for a function of yours that returns model and loss_fn."));
  }

  /* What the terms of the loss were; those that are not finite come first. */
  function terms(card) {
    if (!card.terms.length) return "";
    const one = ([name, x], i) => {
      const said = [h("bdi", {}, name), ` ${Plots.number(x)}`];
      return h("span", {}, i ? ", " : "", typeof x === "string" ? h("b", { class: "nonfinite" }, ...said) : h("span", {}, ...said));
    };
    return h("p", { class: "terms" }, "Terms: ", ...card.terms.map(one), card.more_terms ? ` and ${card.more_terms} more` : "");
  }

  /* Where an incident was not diagnosed: the earlier one that it is like, if there is one. */
  function likeness(card, prefix) {
    if (card.same_as === null) return h("p", {}, "Not diagnosed.");
    const said = ["As at step ", whole(card.same_as), card.like_cause && ": ", card.like_cause && h("b", {}, text(card.like_cause))].filter(Boolean);
    if (!card.like) return h("p", {}, ...said, ".");
    const name = `${prefix}incident-${card.like}`, link = h("a", { href: `#${name}` }, ...said);
    link.addEventListener("click", () => { document.getElementById(name).open = true; }); // also where the address does not change
    return h("p", {}, link, ".");
  }

  /* How many incidents share a card. */
  const times = (card) => (card.count > 1 ? `${whole(card.count)} times` : "");

  /* What is in a card. On a page with several runs the ids of each begin with a prefix of its own. */
  function body(card, prefix, choose) {
    const numbers = [`loss ${Plots.number(card.loss)}`, `gradient norm ${Plots.number(card.grad_norm)}`];
    if (card.rank !== null) numbers.push(`rank ${card.rank}`);
    if (card.micro_batch !== null) numbers.push(`micro-batch ${card.micro_batch}`);
    const show = h("button", { type: "button" }, "Show in the curves");
    show.addEventListener("click", () => {
      Plots.ofPart?.(card.part);
      Plots.setView(card.step - 50, card.step + 50);
      choose(card.number);
      document.getElementById("curves").scrollIntoView();
    });
    const parts = [
      ["What happened", h("p", { dir: "auto" }, text(card.message)), soft(`At that step: ${numbers.join(", ")}.`), terms(card)],
      ["What was done", card.outcome && h("p", { dir: "auto" }, text(card.outcome))],
      ["It happened again", card.again && h("p", {}, card.again)],
      ...(card.diagnosis ? told(card.diagnosis) : [["Why", likeness(card, prefix)]]),
      ["Steps around it", card.around.length && around(card)],
      ["Gradients to blame", card.culprits.length && culprits(card), card.more_culprits && soft(`and ${whole(card.more_culprits)} more`)],
      ["The batch", ...samples(card.samples)],
      ["Run it again", again(card)],
    ];
    const given = parts.map(([title, ...said]) => [title, said.filter(Boolean)]).filter(([, said]) => said.length);
    return h("div", { class: "body" }, ...given.flatMap(([title, said]) => [h("h3", {}, title), ...said]), h("p", {}), show);
  }

  /* What is in it is made when it is first opened. */
  function make(there, prefix = "", choose = Plots.choose) {
    const { card } = there;
    there.times = h("span", { class: "times" }, times(card));
    const known = card.diagnosis && card.diagnosis.cause !== "unknown" ? card.diagnosis : null;
    const cause = known ? known.cause : card.like_cause;
    const act = `${cause ? `${card.kind}, ` : ""}${DONE[card.action] || card.action}`;
    const tag = known ? h("span", { class: `tag ${known.verified ? "yes" : "no"}` }, known.verified ? "fix verified" : "fix not verified") : "";
    const element = h("details", { id: `${prefix}incident-${card.number}` }, h("summary", {}, h("span", { class: "step" }, `Step ${whole(card.step)}`),
      card.optimizer ? h("span", { class: "act" }, text(card.optimizer, 80)) : "",
      h("span", { class: "kind" }, cause ? text(cause, 80) : card.kind), h("span", { class: "act" }, act), there.times, tag));
    there.fill = (anew) => {
      const [, old] = element.children;
      if (old && anew) old.replaceWith(body(there.card, prefix, choose));
      else if (!old && !anew) element.append(body(there.card, prefix, choose));
    };
    element.firstChild.addEventListener("click", () => { current = card.number; there.fill(); });
    element.addEventListener("toggle", () => {
      if (!element.open) return;
      there.fill();
      choose(card.number);
    });
    there.element = element;
    return element;
  }

  function update(given) {
    data = given;
    const parent = document.getElementById("cards");
    for (const card of data.incidents) {
      const told = JSON.stringify(card), there = cards.get(card.number);
      if (there && there.told === told) continue;
      if (there) { // what is open stays open
        there.card = card; there.told = told;
        there.times.textContent = times(card);
        there.fill(true);
      } else {
        cards.set(card.number, { card, told });
        parent.append(make(cards.get(card.number)));
      }
    }
    document.getElementById("no-cards").hidden = data.all_incidents > 0;
    const more = data.all_incidents - [...cards.values()].reduce((sum, there) => sum + there.card.count, 0);
    document.getElementById("more-cards").textContent =
      more > 0 ? `${whole(more)} more are in incidents.jsonl; shown are the first of each cause and the newest.` : "";
  }

  function open(number, scroll) {
    const there = cards.get(number) || [...cards].filter(([other]) => other >= number).map((pair) => pair[1])[0];
    if (!there) return;
    current = there.card.number;
    there.fill();
    there.element.open = true;
    Plots.choose(number);
    if (scroll) { there.element.scrollIntoView({ block: "start" }); there.element.firstChild.focus({ preventScroll: true }); }
  }

  /* The next or the previous card, counted from the one that was opened last. */
  function step(by) {
    const numbers = [...cards.keys()];
    if (!numbers.length) return;
    const place = numbers.indexOf(current);
    open(numbers[place < 0 ? (by > 0 ? 0 : numbers.length - 1) : Math.max(0, Math.min(numbers.length - 1, place + by))], true);
  }

  return { make, update, open, step };
})();
