// Shows what the chosen machine measured, in the picture and in each lesson, and the charts of all machines.
const find = query => document.querySelector(query), all = query => [...document.querySelectorAll(query)];
const escape = text => text.replace(/[&<>"]/g, character => `&#${character.charCodeAt()};`);
const safe = (key, value) => typeof value === "string" ? escape(value) : value; // all texts, before they become HTML
const machines = all("script.data").map(script => JSON.parse(script.textContent, safe));
const kinds = Object.entries(JSON.parse(find("#kinds").textContent)); // [kind of work, color]
const floors = JSON.parse(find("#floors").textContent); // counted: the least time a step can take on a card
const sum = values => values.reduce((total, value) => total + value, 0);
const join = (values, html) => values.map(html).join("");
const digitsOf = ms => ms < 200 ? 1 : 0; // of the milliseconds of a step and of its parts

function number(value, digits = 0) {
  const options = {minimumFractionDigits: digits, maximumFractionDigits: digits};
  return value == null ? "–" : value.toLocaleString("en", options).replace("-", "−");
}

// Bars as charts.py makes them, one below the other; with `only` one kind of work of each.
function bars(rows, only = null) {
  const parts = row => row.parts.map((value, i) => [i, value]).filter(([i]) => i === (only ?? i));
  const length = row => sum(parts(row).map(([, value]) => value));
  const marks = row => only === null ? row : {...row, floor: null, end: number(length(row), digitsOf(length(rows[0])))};
  const most = Math.max(...rows.map(marks).map(row => Math.max(length(row), row.high ?? 0, row.floor ?? 0)));
  const at = value => `${(100 * value / most).toFixed(2)}%`;
  return `<div class="bars">${join(rows.map(marks), row => `<div class="row">
    <a class="name" ${row.label ? `href="#rung-${row.label}"><span>${row.label}</span>` : ">"}${row.title}</a>
    <div class="bar${row.pale ? " doubtful" : ""}" tabindex="0" role="img" aria-label="${[row.title, ...row.tip].join("; ")}">
    ${join(parts(row), ([i, value]) => `<i data-kind="${row.parts[1] === undefined ? "" : kinds[i][0]}"
      style="width:${at(value)};background:${row.parts[1] === undefined ? "var(--bar)" : kinds[i][1]}"></i>`)}
    ${row.floor ? `<i class="floor" style="left:${at(row.floor)}"></i>` : ""}
    ${row.high ? `<i class="spread" style="left:${at(row.low)};width:${at(row.high - row.low)}"></i>` : ""}
    <b style="margin-left:${at(row.high ? row.high - length(row) : 0)}">${row.end}</b>
    </div></div>`)}</div>`;
}

function gain({rows}) { // what rungs 0 to 10 gain, in a sentence
  const first = rows.find(row => row.label === "0"), last = rows.filter(row => row.label && row.label <= 10).at(-1);
  return !first || last === first ? "" :
    `Rung ${last.label} trains ${number(last.speed / first.speed, 1)} times as many tokens per second as the baseline.`;
}

function drawPicture(machine, only = null) {
  find("#picture").innerHTML = `<p>${gain(machine)} Measured on ${machine.name}.</p>` + (machine.profile.length ? `
    <div class="legend" role="group" aria-label="Kinds of work: show one alone">${join(kinds, ([kind, color], i) =>
      `<button aria-pressed="${i === only}"><i style="background:${color}"></i>${kind}</button>`)}
    <span><i class="floor"></i>floor</span></div>
    ${bars(machine.profile, only)}
    <p class="dim">Milliseconds of a step by kind of work, under a profiler. The head is the product with the matrix of
    the vocabulary. The floor is what all products of matrices, attention’s included, take at the rate measured on this
    machine; where it is shared, its speed drifts, and equal work differs from bar to bar. Pale bars, marked (!), differ
    by more than 10 % from the step without the profiler. Point at a bar, or tap it, for the numbers; choose a kind of
    work to see it alone.</p>` : `${bars(machine.speed)}
    <p class="dim">Tokens per second; the thin lines are the spread. This machine has no profile, so no time by kind of
    work.</p>`);
  all(".legend button").forEach((button, i) => {
    button.onclick = () => { drawPicture(machine, i === only ? null : i); all(".legend button")[i].focus(); };
  });
}

const change = (from, to, digits) => from == null || to == null || number(from, digits) === number(to, digits) ? "" :
  (to > from ? "+" : "") + number(to - from, digits);

// A table's line for two rungs, or, without `old`, for one.
const lineFor = old => (title, from, to, {digits, told = change(from, to, digits), css = ""} = {}) => to == null ? "" :
  `<tr class="${css}"><th scope="row">${title}</th>${old ? `<td>${number(from, digits)}</td>` : ""}
  <td>${number(to, digits)}</td>${old ? `<td>${told}</td>` : ""}</tr>`;

function counted({label, before}) { // what a lesson's step costs at least on the chosen card, as HTML
  const card = find("#card").value, now = floors.rungs[label], old = floors.rungs[before];
  if (!now) return "";
  const line = lineFor(old), ms = (rung, part) => rung?.ms[card][part], digits = digitsOf(now.ms[card].floor);
  const parts = {floor: "floor, ms", products: "its matrix products alone", traffic: "its memory traffic alone"};
  return `<h4 class="counted">Counted <span>for one ${card}, B=${floors.B} T=${floors.T}: the least a step can take</span></h4>
    <table><tbody>${join(Object.entries(parts), ([part, title]) =>
      line(title, ms(old, part), ms(now, part), {digits, css: part === "floor" ? "" : "same"}))}
    ${line("GB read and written", old?.gb, now.gb)}${line("kernel launches", old?.launches, now.launches)}
    </tbody></table>${card !== "A100" || !now.lecture ? "" : `<h4 class="counted">Published
    <span>in Karpathy’s lecture, one A100, B=16 T=1024</span></h4>
    <table><tbody>${line("published, ms", old?.lecture, now.lecture)}</tbody></table>`}`;
}

function effect(machine, {label, before}) { // what a lesson measured, as HTML
  const rung = (rows, label) => label && rows.find(row => row.label === label);
  const now = machine && rung(machine.rows, label), old = machine && rung(machine.rows, before);
  if (!now) return "<p>Not on any machine yet.</p>";
  const [oldTime, time] = [before, label].map(each => rung(machine.profile, each));
  const line = lineFor(old), digits = digitsOf(now.ms), steps = [oldTime, time].filter(Boolean);
  const spread = row => [row.low, row.high].map(ms => number(ms, digitsOf(row.ms))).join("–");
  return `${steps.length ? bars(steps.map(bar => ({...bar, title: `rung ${bar.label}`, label: ""}))) : ""}<table>
    <thead><tr><td></td>${old ? `<th scope="col">rung ${before}</th>` : ""}<th scope="col">rung ${label}</th>
    ${old ? '<th scope="col">change</th>' : ""}</tr></thead>
    <tbody>${line("ms/step", old?.ms, now.ms, {digits})}
    <tr class="same"><td colspan="4">spread ${[old, now].filter(Boolean).map(spread).join(" → ")}</td></tr>
    ${line("tokens/sec", old?.speed, now.speed, {told: `×${number(now.speed / old?.speed, 2)}`})}
    ${line("memory, GB", old?.memory, now.memory, {digits: 2})}
    ${line("MFU, %", old?.mfu, now.mfu)}
    ${line(`loss at step ${now.step}`, old?.loss, now.loss, {digits: 3})}
    ${line("validation loss", old?.val, now.val, {digits: 3})}
    ${line(`tokens to ${now.target}`, old?.tokens_to, now.tokens_to)}
    ${line(`seconds to ${now.target}`, old?.seconds_to, now.seconds_to, {digits: now.seconds_to < 20 ? 1 : 0})}</tbody>
    <tbody>${!time || steps.some(bar => bar.pale) ? "" : join(kinds, ([kind, color], i) => {
      const [from, to, whole] = [oldTime?.parts[i], time.parts[i], sum(steps[0].parts)];
      if (Math.max(from ?? 0, to) < 0.005 * whole) return "";
      const same = Math.abs(to - from) < 0.02 * whole ? {told: "", css: "same"} : {}; // what changed stands out
      return line(`<i style="background:${color}"></i>${kind}`, from, to, {digits, ...same});
    })}</tbody></table>${!old ? "" : old.tokens !== now.tokens ?
      `<p>A step reads ${number(now.tokens)} tokens, in rung ${before} ${number(old.tokens)}.</p>` :
      now.p == null ? "<p>Too few rounds to tell a difference in speed from chance.</p>" :
      now.differs ? "" : `<p>No significant difference in speed (p = ${number(now.p, 2)}).</p>`}`;
}

function choose(id) {
  const machine = machines.find(each => each.id === id) ?? machines.find(each => each.id === find("#machine").value);
  const reading = all("section").find(section => section.getBoundingClientRect().bottom > innerHeight / 4);
  const top = reading.getBoundingClientRect().top, scrolled = scrollY > 0, card = find("#card").value;
  find("#machine").value = machine.id;
  drawPicture(machine);
  all(".effect").forEach(box => {
    const {label, before} = box.dataset; // of another machine, where the chosen machine did not measure both
    const has = (each, label) => each.rows.some(row => row.label === label);
    const fits = [each => has(each, label) && has(each, before), each => has(each, label)];
    const source = fits.map(fit => [machine, ...machines].find(fit)).find(Boolean);
    box.innerHTML = `<h4>Measured <span>on ${source?.name ?? "no machine"}</span></h4>${effect(source, box.dataset)}
      ${counted(box.dataset)}`;
  });
  all("#published li").forEach(row => { row.hidden = !card.startsWith(row.dataset.card); });
  find("#unpublished").hidden = all("#published li").some(row => !row.hidden);
  // Readers who have scrolled stay where they were; the page itself begins at its top.
  if (scrolled) scrollBy({top: reading.getBoundingClientRect().top - top, behavior: "instant"});
  try {
    localStorage.setItem("machine", machine.id);
    localStorage.setItem("card", card);
  } catch { /* this browser remembers nothing */ }
}
let remembered = null;
try {
  remembered = localStorage.getItem("machine");
  const card = localStorage.getItem("card");
  if (all("#card option").some(option => option.value === card)) find("#card").value = card;
} catch { /* the same */ }
choose(remembered);
find("#machine").onchange = event => choose(event.target.value);
// What was added above a lesson must not push it away from a reader who came by a link to it.
if (location.hash) addEventListener("load", () => setTimeout(() => find(location.hash)?.scrollIntoView(), 100));
find("#card").onchange = () => choose(find("#machine").value);

// The tip: a bar's label as a table, beside the pointer, or below the bar that the keyboard is on.
function showTip(event) {
  const bar = event.target.closest?.(".bar"), tip = find("#tip");
  tip.hidden = !bar || (event.type === "focusin" && !bar.matches(":focus-visible"));
  if (tip.hidden) return;
  const [title, ...lines] = bar.getAttribute("aria-label").split("; "), box = bar.getBoundingClientRect();
  const css = name => name === event.target.dataset.kind ? "strong" : "";
  tip.innerHTML = `<b>${escape(title)}</b><table>${join(lines.map(line => escape(line).split(": ")), ([name, text]) =>
    `<tr class="${css(name)}"><td>${name}</td><td>${text}</td></tr>`)}</table>`;
  const [x, y] = event.type === "focusin" ? [box.left, box.bottom] : [event.clientX, event.clientY];
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${y + 18 + tip.offsetHeight > innerHeight ? y - tip.offsetHeight - 12 : y + 18}px`;
}
for (const type of ["mousemove", "click", "focusin"]) addEventListener(type, showTip);
addEventListener("scroll", () => showTip({type: "focusin", target: document.activeElement}));

function lossChart(host, machine, x) {
  const css = name => () => getComputedStyle(document.documentElement).getPropertyValue(name);
  const lines = {stroke: css("--line"), width: 1};
  const axis = label => ({label, labelSize: 24, stroke: css("--dim"), grid: lines, ticks: lines});
  const hue = i => 260 - 230 * i / Math.max(1, machine.curves.length - 1);
  // By seconds each curve has points of its own: take the one that is nearest to the pointer.
  const nearest = (chart, i, index) => chart.data[i].reduce((best, value, j) =>
    value != null && Math.abs(j - index) < Math.abs(best - index) ? j : best, i ? -1e9 : index);
  const {target} = machine.rows[0]; // of a race, which differs where it gets there
  const range = (plot, low, high) => target ? [low - 0.1, target + 1.5 * (target - low) + 0.1]
    : uPlot.rangeNum(low, high, 0.1, true);
  const chart = new uPlot({
    width: host.clientWidth, height: 380, scales: {x: {time: false}, y: {range}}, focus: {alpha: 0.25},
    cursor: {focus: {prox: 24}, dataIdx: nearest},
    axes: [axis(x === "steps" ? "step" : `seconds of training${machine.race ? "" : ", the first step included"}`),
      axis("loss (nats)")],
    series: [{label: x === "steps" ? "step" : "seconds"}, ...machine.curves.map((curve, i) => ({
      label: curve.title, stroke: `oklch(0.65 0.15 ${hue(i)})`, width: 1.6, spanGaps: true, dash: curve.val && [5, 4],
      points: {show: false}, value: (plot, loss) => number(loss, 3),
    }))],
  }, uPlot.join(machine.curves.map(curve => [curve[x], curve.loss])), host);
  host.querySelectorAll(".u-series th").forEach(name => {
    name.tabIndex = 0;
    name.onkeydown = event => { if (event.key === "Enter") name.click(); };
  });
  return chart;
}

all("section.machine").forEach((section, i) => {
  const host = section.querySelector(".chart");
  let chart = null;
  const draw = kind => {
    const losses = kind.startsWith("loss");
    host.innerHTML = losses ? "" : bars(machines[i][kind]);
    chart = losses ? lossChart(host, machines[i], kind === "loss by step" ? "steps" : "seconds") : null;
  };
  section.querySelectorAll("input").forEach(radio => { radio.onchange = () => draw(radio.value); });
  draw(section.querySelector(":checked").value);
  new ResizeObserver(() => chart?.setSize({width: host.clientWidth, height: 380})).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart?.redraw());
});

all(".race .chart").forEach(host => {
  const chart = lossChart(host, machines.find(machine => machine.id === host.dataset.machine), "seconds");
  new ResizeObserver(() => chart.setSize({width: host.clientWidth, height: 380})).observe(host);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.redraw());
});

// The contents: on a phone they close when a link is followed; they mark where the reader is.
const contents = find("#contents");
contents.onclick = event => {
  if (event.target.closest("a") && contents.matches(":popover-open")) contents.hidePopover();
};
const spy = new IntersectionObserver(entries => entries.filter(entry => entry.isIntersecting).forEach(({target}) => {
  const link = contents.querySelector(`[href="#${target.id || "machines"}"]`);
  contents.querySelector("[aria-current]")?.removeAttribute("aria-current");
  link.setAttribute("aria-current", "true");
  contents.scrollTop = link.offsetTop - contents.clientHeight / 2;
}), {rootMargin: "-20% 0px -79% 0px"});
all("main section").forEach(section => spy.observe(section));
