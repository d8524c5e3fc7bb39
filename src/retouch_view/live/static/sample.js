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
  return { written: [completion(line), chain(name, line)], more };
}

const LEVELS = [-0.1, -0.7, -1.6, -3];
const WORDS = ["above 0.9", "above 0.5", "above 0.2", "above 0.05", "less"];
const MOST_TOKENS = 5000;

/** The completion; where its tokens are stored, their background says how probable each was. */
function completion(line) {
  const tokens = (Array.isArray(line.tokens) ? line.tokens : []).filter((each) => Array.isArray(each) && typeof each[0] === "string").slice(0, MOST_TOKENS);
  if (!tokens.length && !line.text) return null;
  if (!tokens.length) return h("section", {}, h("h3", {}, "Completion"), h("pre", { dir: "auto" }, line.text));
  const level = (value) => (LEVELS.findIndex((limit) => value > limit) + LEVELS.length + 1) % (LEVELS.length + 1);
  return h("section", {}, h("h3", {}, "Completion"),
    h("pre", { class: "tokens", dir: "auto" }, tokens.map(([piece, value]) =>
      h("span", { class: `level-${level(value)}`, title: `log-probability ${number(value)}` }, piece || "∎"))),
    h("p", { class: "quiet" }, "∎ is a special token, such as the end. Probability of each token: ", WORDS.map((words, index) => [h("span", { class: `level-${index}` }, words), " "])));
}

/** The states of the denoising chain, where they are stored. */
function chain(name, line) {
  const states = (Array.isArray(line.states) ? line.states : []).filter((each) => typeof each === "string");
  if (!states.length) return null;
  return h("section", {}, h("h3", {}, "Denoising steps around its actions"), h("div", { class: "strip" }, states.map((file, index) => h("figure", {},
    h("img", { src: `/thumbnails/${path(name, line.step, file)}`, alt: `state ${index}`, loading: "lazy" }),
    h("figcaption", {}, index === 0 ? "before the first action" : `after action ${index}`)))));
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
    h("summary", {}, `Answer ${index + 1} by `, each.rubric ? text(each.judge) : "a reward server", " ", each.fault ? h("span", { class: "state alarm" }, text(each.fault)) : scores(each.scores)),
    h("pre", { dir: "auto" }, each.text || "no words"),
    each.characters > each.text.length && h("p", { class: "quiet" }, `The first ${each.text.length} of ${each.characters} characters.`),
    h("p", { class: "quiet" }, `${number(each.seconds)} s, ${each.attempts} ${each.attempts === 1 ? "attempt" : "attempts"}`,
      each.cost === null ? "" : `, cost ${number(each.cost)}`))));
}

function scores(found) {
  return h("span", { class: "quiet" }, Object.entries(found ?? {}).map(([key, value]) => [text(key), ` ${number(value)}  `]));
}
