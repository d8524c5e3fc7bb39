// The charts, from their points.
for (const place of document.querySelectorAll("[data-chart]")) {
  const { series, options, size } = JSON.parse(place.dataset.chart);
  place.replaceWith(chart(series, options, size));
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
