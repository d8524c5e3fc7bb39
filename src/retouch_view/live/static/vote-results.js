// What the votes of a run say: win rates, the table of arms, judges against people, and voters.

import { features, fill, h, load, number, path, text } from "./dom.js";

const FEWEST = 10;
const STATUS = { consistent: "consistent", inconsistent: "may be guesses", unknown: "too few repeats" };

export async function voteResultsPage(main, signal, run) {
  const found = await load(`/api/votes/${path(run)}/results`);
  const { vote } = await features();
  if (signal.aborted) return;
  const choices = { left: "left", right: "right", tie: "tie", both_bad: "both bad" };
  fill(main,
    h("h1", {}, "Votes on images of ", h("a", { href: `#/run/${path(run)}` }, text(run))),
    h("div", { class: "tools" }, vote && h("a", { class: "button", href: `#/vote/${path(run)}` }, "Vote"), h("span", { class: "quiet" },
      `${found.votes} votes on ${found.pairs} pairs of ${found.tasks} tasks`,
      found.undone ? `, ${found.undone} taken back` : "", found.damaged ? `, ${found.damaged} damaged lines` : "")),
    found.votes === 0 && h("p", { class: "quiet" }, vote ? "No votes yet." : "No votes yet. Start `retouch view` with --vote to collect some."),
    section("Win rates", "Counted: how often people preferred the first to the second. Ties count one half. The bar is the 95 % interval over tasks.",
      ["", "against", "counted win rate", "", "votes", "ties"],
      found.win_rates.map((row) => [text(row.arm), text(row.other), share(row.share), interval(row.share), row.share.count, row.ties]), 4),
    section("Bradley-Terry model", "Fitted to all votes: the strength in log-odds, whose mean is 0, and the model's probability to win against an arm of mean strength. It is no count of votes.",
      ["", "strength", "95 % interval", "votes", "modelled probability"],
      found.arms.map((row) => [text(row.arm), number(row.strength), `${number(row.low)} to ${number(row.high)}`, row.votes, percent(row.wins_against_mean)]), 3),
    section("Judges against people", "How often a judge's score orders two images as people did. 50 % is chance; below it, people prefer a lower score.",
      ["column", "tasks", "agreement", "", "votes"],
      found.judges.map((row) => [text(row.column), text(row.category), share(row.share), interval(row.share), row.share.count]), 4),
    section("Voters", "Consistency: how often a voter answered a hidden repeat as before.",
      ["voter", "votes", "left", "consistency", "", "repeats", ""],
      found.voters.map((row) => [text(row.name), row.votes, percent(row.left.value), share(row.consistency), interval(row.consistency), row.consistency.count, STATUS[row.status] ?? row.status])),
    found.votes > 0 && h("p", { class: "quiet" }, `Answers: ${Object.entries(choices).map(([key, words]) => `${words} ${found.choices[key]}`).join(", ")}.`),
    found.voter_agreement.count > 0 && h("p", { class: "quiet" }, `Two voters who both decided on a pair agreed in ${share(found.voter_agreement)} of ${found.voter_agreement.count} cases.`));
}

/** A table. votes: the column with the number of votes; rows with fewer than FEWEST are folded. */
function section(title, help, heads, rows, votes = null) {
  const table = (part) => h("div", { class: "scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, part.map((cells) => h("tr", {}, cells.map((cell, index) => (index ? h("td", {}, cell) : h("th", { scope: "row" }, cell))))))));
  const few = votes === null ? [] : rows.filter((row) => row[votes] < FEWEST);
  const enough = rows.filter((row) => !few.includes(row));
  return rows.length > 0 && h("section", {}, h("h2", {}, title), h("p", { class: "quiet" }, help), enough.length > 0 && table(enough),
    few.length > 0 && h("details", {}, h("summary", {}, `${few.length} row${few.length === 1 ? "" : "s"} with fewer than ${FEWEST} votes`), table(few)));
}

function percent(value) {
  return typeof value === "number" ? `${(100 * value).toFixed(0)} %` : "–";
}

function share(found) {
  return found.count ? `${percent(found.value)} (${percent(found.low)} to ${percent(found.high)})` : "–";
}

/** The interval of a share as a line from 0 to 1, with a mark at one half. */
function interval(found) {
  if (!found.count) return "";
  const x = (value) => 1 + 98 * value;
  return h("svg", { viewBox: "0 0 100 14", class: "interval", "aria-hidden": "true" },
    h("line", { x1: 1, x2: 99, y1: 7, y2: 7, class: "grid" }), h("line", { x1: 50, x2: 50, y1: 2, y2: 12, class: "grid" }),
    h("line", { x1: x(found.low), x2: x(found.high), y1: 7, y2: 7, class: "bar" }), h("circle", { cx: x(found.value), cy: 7, r: 3.2, class: "dot series-0" }));
}
