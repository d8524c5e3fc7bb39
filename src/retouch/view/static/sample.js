// Parts of a sample's dialog: the completion, its group in the order of rewards, and the answers of judges.

import { fill, h, load, number, path, text } from "./dom.js";

/** Elements, of which some are filled when their content has arrived. */
export function details(name, line, signal) {
  const more = h("div");
  const group = h("div");
  const answers = h("div");
  more.append(group, answers);
  if (line.set === "group") ranked(name, line).then((found) => !signal.aborted && fill(group, found), () => {});
  judged(name, line).then((found) => !signal.aborted && fill(answers, found), (error) => fill(answers, h("p", { class: "quiet" }, error.message)));
  return { written: completion(line), more };
}

function completion(line) {
  if (!line.text) return null;
  return h("section", {}, h("h3", {}, "Completion"), h("pre", { dir: "auto" }, line.text));
}

/** The samples of the same group, the best first, with their advantages. */
async function ranked(name, line) {
  const query = new URLSearchParams({ step: line.step, set: "group", task: line.task, limit: 500 });
  const { samples } = await load(`/api/runs/${path(name)}/samples?${query}`);
  const group = samples.filter((each) => each.group === line.group);
  if (group.length < 2) return null;
  const best = (each) => (typeof each.reward === "number" ? each.reward : -Infinity);
  group.sort((one, other) => best(other) - best(one));
  return h("section", {}, h("h3", {}, "Its group, best first"), h("div", { class: "strip ranked" }, group.map((each) => h("figure", { class: each.slot === line.slot ? "chosen" : "" },
    each.image ? h("img", { src: `/thumbnails/${path(name, each.step, each.image)}`, alt: `sample ${each.slot}`, loading: "lazy" }) : h("span", { class: "noimage" }, "no image"),
    h("figcaption", {}, `reward ${number(each.reward)}`, h("br"),
      h("span", { class: each.advantage > 0 ? "plus" : each.advantage < 0 ? "minus" : "" }, `advantage ${signed(each.advantage)}`))))));
}

function signed(value) {
  return typeof value === "number" && value > 0 ? `+${number(value)}` : number(value);
}

/** What the judges answered about the image. */
async function judged(name, line) {
  const query = new URLSearchParams({ set: line.set, step: line.step, group: line.group, slot: line.slot });
  const { answers } = await load(`/api/runs/${path(name)}/answers?${query}`);
  if (!answers.length) return null;
  return h("section", {}, h("h3", {}, "What the judges answered"), answers.map((each, index) => h("details", { open: answers.length === 1 },
    h("summary", {}, `Answer ${index + 1} `, each.fault ? h("span", { class: "state alarm" }, text(each.fault)) : scores(each.scores)),
    h("pre", { dir: "auto" }, each.text || "no words"),
    each.characters > each.text.length && h("p", { class: "quiet" }, `The first ${each.text.length} of ${each.characters} characters.`),
    h("p", { class: "quiet" }, `${number(each.seconds)} s, ${each.attempts} ${each.attempts === 1 ? "attempt" : "attempts"}`,
      each.cost === null ? "" : `, cost ${number(each.cost)}`))));
}

function scores(found) {
  return h("span", { class: "quiet" }, Object.entries(found ?? {}).map(([key, value]) => [text(key), ` ${number(value)}  `]));
}
