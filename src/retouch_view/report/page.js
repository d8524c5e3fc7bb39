"use strict";
// What a chart shows under the pointer.
for (const area of document.querySelectorAll(".area")) {
  const rows = JSON.parse(area.dataset.hover);
  if (!rows.length) continue;
  const hair = document.createElement("span");
  const note = document.createElement("span");
  hair.className = "hair";
  note.className = "reading";
  hair.hidden = note.hidden = true;
  area.append(hair, note);
  area.addEventListener("pointermove", (event) => {
    const box = area.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width;
    let best = rows[0];
    for (const row of rows) if (Math.abs(row[0] - at) < Math.abs(best[0] - at)) best = row;
    hair.style.left = note.style.left = 100 * best[0] + "%";
    note.style.transform = "translateX(" + -100 * best[0] + "%)";
    note.textContent = best[1];
    hair.hidden = note.hidden = false;
  });
  area.addEventListener("pointerleave", () => {
    hair.hidden = note.hidden = true;
  });
}
// A click on a small chart makes it as wide as the page, and another one small again.
for (const chart of document.querySelectorAll(".small")) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "larger";
  const toggle = () => {
    button.textContent = chart.classList.toggle("wide") ? "smaller" : "larger";
  };
  button.addEventListener("click", toggle);
  chart.querySelector(".area").addEventListener("click", toggle);
  chart.querySelector("figcaption").append(button);
}
// Orders of the held-out tasks.
for (const cards of document.querySelectorAll(".cards[data-sortable]")) {
  const bar = document.createElement("div");
  bar.className = "orders";
  const orders = [
    ["as chosen", (card) => Number(card.dataset.place)],
    ["most gained first", (card) => -Number(card.dataset.gain)],
    ["most lost first", (card) => Number(card.dataset.gain)],
  ];
  orders.forEach(([name, key], index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = name;
    button.setAttribute("aria-pressed", String(index === 0));
    button.addEventListener("click", () => {
      for (const other of bar.children) other.setAttribute("aria-pressed", String(other === button));
      cards.append(...Array.from(cards.children).sort((one, other) => key(one) - key(other)));
    });
    bar.append(button);
  });
  if (cards.children.length > 12) {
    const all = document.createElement("button");
    all.type = "button";
    all.className = "all";
    all.textContent = "show all " + cards.children.length;
    cards.classList.add("few");
    all.addEventListener("click", () => {
      cards.classList.remove("few");
      all.remove();
    });
    cards.after(all);
  }
  cards.before(bar);
}
