// Requests to a run that is training, and its answers. The buttons are there only with `retouch view --control`.

import { h, path, send, text } from "./dom.js";

/** The buttons, which stay in the page while the rest of it is drawn again. */
export function controls(run) {
  const status = h("p", { class: "quiet", role: "status" });
  const every = h("input", { type: "number", min: 0, max: 1000000, value: run.recipe.samples?.every ?? 25, "aria-label": "steps between samples" });
  let before = null; // the newest request when the last one was made, as text
  const newest = (current) => JSON.stringify(current.requests?.slice(-1).map((each) => [each.at, each.action, each.value]) ?? []);
  const ask = async (action, value = null) => {
    status.textContent = "Sending.";
    try {
      before = newest(run);
      await send(`/api/runs/${path(run.name)}/control`, { action, value });
      status.textContent = "The run takes the request at the end of its current step.";
    } catch (error) {
      status.textContent = error.message;
    }
  };
  const button = (label, listener) => h("button", { class: "button", type: "button", onclick: listener }, label);
  const element = h("section", { class: "control", "aria-label": "control" },
    h("h2", {}, "Control"),
    h("div", { class: "tools" },
      button("Save a checkpoint", () => ask("checkpoint")),
      button("Stop after this step", () => window.confirm("Stop the run after this step? It can be resumed with the same command.") && ask("stop")),
      h("span", { class: "pair" }, h("label", {}, "Store samples every ", every, " steps "), button("Change", () => ask("samples", every.valueAsNumber)))),
    status);
  const show = (current) => {
    element.hidden = current.state !== "running";
    if (before !== null && newest(current) !== before && current.requests.at(-1).taken !== null) [before, status.textContent] = [null, ""]; // the list has the answer
  };
  return { element, show };
}

/** The requests that were made, the newest first. */
export function requests(run) {
  if (!run.requests?.length) return null;
  const words = { stop: "stop", checkpoint: "checkpoint", samples: "samples" };
  const rows = [...run.requests].reverse().map((each) => h("tr", {},
    h("th", { scope: "row" }, words[each.action] ?? each.action, each.value === null ? "" : ` every ${each.value}`),
    h("td", {}, each.taken === null ? "waiting for the end of the step" : each.taken ? "done" : "refused"),
    h("td", {}, text(each.answer ?? "")),
    h("td", {}, text(each.by)), h("td", {}, new Date(each.at).toLocaleString())));
  return h("section", {}, h("h2", {}, "Requests"), h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, ["request", "state", "answer", "by", "at"].map((name) => h("th", { scope: "col" }, name)))), h("tbody", {}, rows))));
}
