// Voting: what to compare, and then pairs of images, answered with keys or fingers. The page does not know what made an image.

import { fill, h, load, path, send, text } from "./dom.js";

const WAIT_MS = 2000;
const NAME = "retouch voter";
const CHOICES = [
  { choice: "left", label: "Left", hint: "←", keys: ["ArrowLeft", "1", "a"] },
  { choice: "tie", label: "Tie", hint: "↑", keys: ["ArrowUp", "0", "t", "="] },
  { choice: "both_bad", label: "Both bad", hint: "↓", keys: ["ArrowDown", "b"] },
  { choice: "right", label: "Right", hint: "→", keys: ["ArrowRight", "2", "d"] },
];
const UNDO = ["Backspace", "u", "z"];

/** #/vote/RUN asks what to compare; #/vote/RUN,live and #/vote/RUN,STEP,OTHER,STEP show pairs. */
export async function votePage(main, signal, names) {
  const [run, first, other, second] = names;
  if (first === undefined) await startPage(main, signal, run);
  else await pairsPage(main, signal, run, first === "live" ? { run, live: "1" } : { run, step: first, other: other || run, other_step: second });
}

async function startPage(main, signal, run) {
  const found = await load(`/api/votes/${path(run)}`);
  if (signal.aborted) return;
  const name = h("input", { id: "voter", required: true, maxlength: 64, autocomplete: "nickname", value: localStorage.getItem(NAME) ?? "" });
  const everything = [{ name: run, steps: found.steps }, ...found.others];
  const step = stepSelect("The step of this run", found.steps, found.steps[0]);
  const otherStep = stepSelect("The other step", found.steps, found.steps.at(-1));
  const other = h("select", { "aria-label": "The other run", onchange: () => {
    const steps = everything.find((each) => each.name === other.value)?.steps ?? [];
    fill(otherStep, ...options(steps, steps.at(-1)));
  } }, everything.map((each) => h("option", { value: each.name }, each.name === run ? "this run" : each.name)));
  const begin = (hash) => (event) => {
    event.preventDefault();
    if (!name.reportValidity()) return;
    localStorage.setItem(NAME, name.value);
    location.hash = hash();
  };
  const canCompare = found.steps.length > 1 || found.others.some((each) => each.steps.length);
  fill(main,
    h("h1", {}, "Vote on images of ", h("a", { href: `#/run/${path(run)}` }, text(run))),
    h("p", {}, "You see two images made for the same instruction, without knowing what made them. Choose the better one."),
    h("form", { class: "vote-start", onsubmit: (event) => event.preventDefault() },
      h("label", { for: "voter" }, "Your name, as it is stored with your votes"), name,
      found.waiting !== null && h("fieldset", {}, h("legend", {}, "Samples of the current group"),
        h("p", { class: "quiet" }, found.waiting ? `${found.waiting} pairs wait for votes, with which the run trains.` : "No pair waits now; new ones appear while the run trains."),
        h("button", { class: "button primary", onclick: begin(() => `#/vote/${path(run)},live`) }, "Vote on this run's samples")),
      canCompare && h("fieldset", {}, h("legend", {}, "Stored held-out images"),
        h("p", { class: "row" }, "Step ", step, " of this run against step ", otherStep, " of ", other),
        h("button", { class: "button primary", onclick: begin(() => `#/vote/${[run, step.value, other.value, otherStep.value].map(encodeURIComponent).join(",")}`) }, "Vote on these pairs")),
      found.waiting === null && !canCompare && h("p", { class: "quiet" }, "This run has no two sets of stored images to compare, and no queue of samples.")),
    h("p", {}, h("a", { href: `#/votes/${path(run)}` }, "Results of the votes so far")));
}

function stepSelect(label, steps, chosen) {
  return h("select", { "aria-label": label }, options(steps, chosen));
}

function options(steps, chosen) {
  return steps.map((each) => h("option", { value: String(each), selected: each === chosen }, String(each)));
}

async function pairsPage(main, signal, run, poll) {
  const voter = localStorage.getItem(NAME) ?? "";
  const said = h("p", { class: "quiet", role: "status" });
  const stage = h("div", { class: "vote-stage" });
  const bar = h("progress", { "aria-label": "progress", max: 1, value: 0 });
  const count = h("span", { class: "quiet" });
  const buttons = CHOICES.map(({ choice, label, hint }) =>
    h("button", { class: `vote-choice ${choice}`, onclick: () => answer(choice) }, label, h("kbd", {}, hint)));
  const undoButton = h("button", { class: "button", onclick: undo }, "Undo ", h("kbd", {}, "u"));
  let question = null;
  let busy = true;
  let given = 0;

  async function show() {
    const found = await load(`/api/next-pair?${new URLSearchParams({ ...poll, voter })}`);
    if (signal.aborted) return;
    ({ question, given } = found);
    bar.max = Math.max(1, found.total);
    bar.value = found.done;
    count.textContent = found.live ? `${found.total - found.done} pairs wait · ${given} votes of yours` : `${found.done} of ${found.total} pairs`;
    undoButton.disabled = given === 0;
    if (question === null) {
      const words = found.live ? "No pair waits. New ones appear here as soon as the run has made them." : found.total ? "You have voted on every pair. Thank you." : "There are no pairs to compare here.";
      fill(stage, h("p", { class: "vote-end" }, words), !found.live && h("p", {}, h("a", { class: "button", href: `#/votes/${path(run)}` }, "See the results")));
      if (found.live) setTimeout(() => { if (!signal.aborted && question === null) refresh(); }, WAIT_MS);
    } else {
      const image = (which) => `/pair-images/${path(question.id, which)}`;
      fill(stage,
        h("div", { class: "vote-task" },
          question.source && h("figure", { class: "vote-source" }, h("img", { src: image("source"), alt: "source image" }), h("figcaption", {}, "Source")),
          h("h1", { class: "vote-instruction", dir: "auto" }, text(question.instruction))),
        h("div", { class: "vote-pair" }, ["left", "right"].map((side) =>
          h("button", { class: "vote-image", "aria-label": `${side} image`, onclick: () => answer(side) }, h("img", { src: image(side), alt: `${side} image` })))));
    }
    for (const button of buttons) button.disabled = question === null;
    busy = false;
  }

  function fail(error) {
    if (!signal.aborted) fill(stage, h("p", { class: "warning", role: "alert" }, error.message), h("p", {}, h("a", { href: `#/vote/${path(run)}` }, "Choose what to compare")));
  }

  function refresh() {
    return show().catch(fail);
  }

  async function act(address, value, words) {
    if (busy) return;
    busy = true;
    try {
      await send(address, value);
      said.textContent = words;
    } catch (error) {
      said.textContent = error.message;
    }
    await refresh();
  }

  function answer(choice) {
    if (question) act("/api/votes", { question: question.id, choice }, `Saved: ${CHOICES.find((each) => each.choice === choice).label.toLowerCase()}.`);
  }

  function undo() {
    if (given) act("/api/undo-vote", { ...poll, voter }, "Your last vote was taken back.");
  }

  document.addEventListener("keydown", (event) => {
    if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, select, textarea")) return;
    const found = CHOICES.find(({ keys }) => keys.includes(event.key));
    if (!found && !UNDO.includes(event.key)) return;
    event.preventDefault();
    if (found) answer(found.choice);
    else undo();
  }, { signal });
  if (!voter) {
    location.hash = `#/vote/${path(run)}`;
    return;
  }
  fill(main, h("div", { class: "vote-head" }, bar, count, undoButton), stage, h("div", { class: "vote-bar", role: "group", "aria-label": "your vote" }, buttons), said);
  await refresh();
}
