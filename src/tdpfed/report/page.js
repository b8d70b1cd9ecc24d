/* The page: the reader's choices are stored in the address after #, so a reload or a copied address keeps them. */

const main = document.getElementById("main");
const redraws = [];

/* Elements contain text nodes only: text from run folders never becomes markup. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const choices = new URLSearchParams(location.hash.slice(1));
function chosen(name, allowed, fallback) { return allowed.includes(choices.get(name)) ? choices.get(name) : fallback; }
function choose(name, value) {
  if (value === null || value === "") choices.delete(name); else choices.set(name, value);
  history.replaceState(null, "", `#${choices}`);
}
function listed(name) { return new Set((choices.get(name) || "").split(".").filter(Boolean).map(Number)); }
function toggle(name, value) {
  const set = listed(name);
  if (!set.delete(value)) set.add(value);
  choose(name, [...set].join("."));
}
function redraw() { redraws.forEach((draw) => draw()); }

/* -- what is shown ---------------------------------------------------------------------------------------------- */

function dataset() { return Number(chosen("data", DATA.datasets.map((_, i) => String(i)), "0")); }
function members() { return DATA.groups.map((_, i) => i).filter((i) => DATA.groups[i].dataset === dataset()); }
function shown() { const hidden = listed("hide"); return members().filter((i) => !hidden.has(i)); }
function runsOf(indices) { return indices.flatMap((i) => DATA.groups[i].runs.map((run) => DATA.runs[run])); }
function has(field) { return runsOf(members()).some((run) => run.series[field]); }

/* -- pieces ----------------------------------------------------------------------------------------------------- */

function segments(title, name, options, fallback, onchange = redraw) {
  const keys = Object.keys(options), now = chosen(name, keys, fallback);
  const option = (key) => el("label", {}, el("input", {
    type: "radio", name, value: key, checked: key === now, onchange: () => { choose(name, key); onchange(); },
  }), el("span", {}, options[key]));
  return el("fieldset", { class: "seg" }, el("legend", {}, title), el("div", {}, keys.map(option)));
}

function check(title, name, onchange = redraw) {
  return el("label", { class: "check" }, el("input", {
    type: "checkbox", checked: choices.get(name) === "1", onchange: (event) => { choose(name, event.target.checked ? "1" : ""); onchange(); },
  }), title);
}

function key(index) {
  const { color, symbol, dash } = look(index), space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg"), stroke = document.createElementNS(space, "line"), mark = document.createElementNS(space, "path");
  for (const [name, value] of Object.entries({ class: "key", viewBox: "0 0 30 12", "aria-hidden": "true" })) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries({ x1: 0, x2: 30, y1: 6, y2: 6, stroke: color, "stroke-width": 2, "stroke-dasharray": SVG_DASHES[dash] })) stroke.setAttribute(name, value);
  for (const [name, value] of Object.entries({ d: SHAPES[symbol], transform: "translate(15,6)", fill: color })) mark.setAttribute(name, value);
  svg.append(stroke, mark);
  return svg;
}

function scroller(label, table) { return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, table); }

/* Rows of {cells, kind}; a column is right-aligned if every cell is a number. */
function simpleTable(label, titles, rows) {
  const texts = titles.map((_, i) => (i > 0 && !rows.every(({ cells }) => /^[\d.,x%e+-]*$/.test(cells[i]))));
  const left = texts.map((text, i) => (!text ? null : rows.some(({ cells }) => cells[i].length > 40) ? "left long" : "left"));
  const cell = (value, i) => (i === 0 ? el("th", { scope: "row" }, value) : el("td", { class: left[i] }, value));
  return scroller(label, el("table", {}, el("thead", {}, el("tr", {}, titles.map((title, i) => el("th", { scope: "col", class: left[i] }, title)))),
    el("tbody", {}, rows.map((row) => el("tr", { class: row.kind || null }, row.cells.map(cell))))));
}

function state(status) { return status === "finished" ? null : el("span", { class: /fail|interrupt/.test(status) ? "pill warn" : "pill" }, status); }

function section(id, title, ...content) {
  const node = el("section", { id }, el("h2", {}, title), ...content);
  main.append(node);
  return node;
}

/* A section whose content depends on the data set; hidden if there is nothing to show. */
function panel(id, title, content) {
  const node = section(id, title), body = el("div");
  node.append(body);
  redraws.push(() => {
    node.hidden = false;  // charts need a visible node to measure their width
    body.replaceChildren();
    node.hidden = content(body) === false;
  });
}

function chart(title, caption) {
  const node = el("div", { class: "chart" });
  return [el("figure", {}, title ? el("h3", {}, title) : null, node, caption ? el("figcaption", {}, caption) : null), node];
}

/* -- head, notes, foot ------------------------------------------------------------------------------------------ */

function count(number, word) { return `${number} ${word}${number === 1 ? "" : "s"}`; }

function head() {
  const top = document.getElementById("top"), methods = new Set(DATA.groups.map((group) => group.method)).size;
  const lead = `${count(DATA.runs.length, "run")} of ${count(methods, "method")}. Created ${DATA.made} by tdpfed ${DATA.version}.`;
  const dark = () => document.documentElement.dataset.theme === "dark";
  const theme = el("button", { type: "button", id: "theme", onclick: () => { choose("theme", dark() ? "light" : "dark"); paint(); redraw(); } });
  const paint = () => {
    document.documentElement.dataset.theme = chosen("theme", ["light", "dark"], matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    theme.textContent = dark() ? "Light page" : "Dark page";
  };
  paint();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { paint(); redraw(); });
  top.append(el("div", {}, el("h1", {}, document.title), el("p", { class: "lead" }, lead)), el("div", { class: "tools" }, DATA.live ? live() : null, theme));
}

function live() {
  const button = el("button", { type: "button", id: "live" }), paused = () => choices.get("paused") === "1";
  const words = () => { button.textContent = paused() ? "Follow the run" : `Pause (reloads every ${DATA.live} s)`; };
  button.addEventListener("click", () => { choose("paused", paused() ? "" : "1"); words(); });
  words();
  setInterval(() => {
    const busy = document.activeElement && document.activeElement.matches("input[type=number]");
    if (!paused() && !busy && document.visibilityState === "visible") location.reload();
  }, 1000 * DATA.live);
  return button;
}

function notices() {
  const running = DATA.runs.filter((run) => run.status === "in progress");
  const far = (run) => `${run.name}: in progress, ${run.planned ? `${run.rounds} of ${run.planned}` : run.rounds} rounds so far (last written ${run.changed})`;
  if (running.length) {
    const what = DATA.live ? "This page follows runs in progress and reloads itself." : `A snapshot of ${DATA.made}: runs are still in progress, and this page does not update itself.`;
    main.append(el("div", { class: "notice", id: "progress" }, what, el("ul", {}, running.map((run) => el("li", {}, far(run))))));
  }
  if (DATA.notes.length) main.append(el("div", { class: "notice warn", id: "notes" }, "Notes:", el("ul", {}, DATA.notes.map((note) => el("li", {}, note)))));
  if (DATA.datasets.length > 1) {
    const names = Object.fromEntries(DATA.datasets.map((one, i) => [String(i), one.name]));
    main.append(el("div", { class: "controls", id: "datasets" }, segments("Data set", "data", names, "0", () => { choose("zoom", ""); choose("target", ""); redraw(); })));
  }
}

/* -- results ---------------------------------------------------------------------------------------------------- */

/* Cost of a run until an accuracy first reaches the target: rounds and megabytes; null if it never does. */
function cost(run, field, target) {
  const series = run.series, at = (series[field] || []).findIndex((value) => value !== null && value >= target);
  return at < 0 ? null : [series.round[at], series.mb[at]];
}

/* Formats numbers as the package does: mean, and the spread over seeds if it is visible at this precision. */
function figure(values, decimals) {
  const [mean, spread] = moments(values), words = (value, digits) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return [mean, words(mean, decimals) + (spread < 0.5 * 10 ** -decimals ? "" : ` ± ${words(spread, decimals)}`), "", spread];
}

/* Marks the lowest cost of a column and the costs not separated from it, among rows of one task. */
function markCosts(rows, at) {
  for (const row of rows) {
    const rivals = rows.filter((one) => DATA.groups[one.index].task === DATA.groups[row.index].task && one.cells[at][0] !== null).map(({ cells }) => cells[at]);
    const means = rivals.map(([mean]) => mean), best = Math.min(...means), [mean, , , spread] = row.cells[at];
    if (mean === null || new Set(means).size < 2) continue;
    const room = Math.max(...rivals.filter(([one]) => one === best).map((cell) => cell[3]));
    row.cells[at][2] = mean === best ? "best" : mean - best <= spread + room ? "close" : "";
  }
}

function costs(runs, field, target) {
  const found = runs.map((i) => (target === null ? null : cost(DATA.runs[i], field, target)));
  if (!found.length || found.includes(null)) return [[null, "-", ""], [null, "-", ""]];
  return [figure(found.map(([rounds]) => rounds), 1), figure(found.map(([, mb]) => mb), 2)];
}

function results() {
  const goal = el("input", { type: "number", id: "target", min: 0, max: 100, step: "any", onchange: (event) => { choose("target", event.target.value); redraw(); } });
  const body = el("div"), kind = el("span");
  section("results", "Results",
    el("p", { class: "hint" }, "Accuracy is the fraction of correct predictions on the clients' held-out samples, for each client's own model (personalized), the models that clients send to the server (local) and the server's model (global). ± is the standard deviation over seeds. Bold marks the best of a column: the highest accuracy, the lowest cost. ≈ marks a value that is not separated from the best: the means differ by no more than the sum of their standard deviations."),
    el("div", { class: "controls" }, el("label", {}, "Target for ", kind, " accuracy, % ", goal)), body);
  redraws.push(() => {
    const field = chosen("accuracy", Object.keys(ACCURACY), "personalized_accuracy"), given = parseFloat(choices.get("target"));
    const target = given >= 0 && given <= 100 ? given / 100 : DATA.datasets[dataset()].targets[field];
    goal.value = target === null ? "" : +(100 * target).toFixed(4);
    kind.textContent = ACCURACY[field].toLowerCase();
    body.replaceChildren(resultTable(field, target));
  });
}

function resultTable(field, target) {
  const between = (list, reach) => [...list.slice(0, DATA.reach_at), ...reach, ...list.slice(DATA.reach_at)];
  const titles = ["method", ...between(DATA.columns, ["rounds to target", "MB to target"])];
  const [column, direction] = (choices.get("sort") || "1.-1").split(".").map(Number);
  const rows = members().map((index) => ({ index, cells: [[DATA.groups[index].label, null, ""], ...between(DATA.groups[index].cells, costs(DATA.groups[index].counted, field, target))] }));
  [1, 2].forEach((place) => markCosts(rows, DATA.reach_at + place));
  const at = column >= 0 && column < titles.length ? column : 1, sign = direction === 1 ? 1 : -1;
  rows.sort((a, b) => {
    const [x, y] = [a.cells[at][0], b.cells[at][0]];
    if (x === null || y === null) return (x === null) - (y === null);
    return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
  });
  const sortBy = (i) => {
    choose("sort", `${i}.${i === at ? -sign : i === 0 ? 1 : -1}`);
    redraw();
    document.querySelector(`#results thead th:nth-child(${i + 1}) button`).focus();
  };
  const header = titles.map((title, i) => el("th", { scope: "col", "aria-sort": i === at ? (sign === 1 ? "ascending" : "descending") : "none" }, el("button", { type: "button", onclick: () => sortBy(i) }, title)));
  const value = (text) => { const [mean, spread] = text.split(" ± "); return spread ? [mean, el("small", {}, ` ± ${spread}`)] : [text]; };
  const values = (cells) => cells.map(([, text, mark]) => el("td", { class: mark || null, title: mark === "close" ? "not separated from the best" : null }, mark === "close" ? "≈ " : null, ...value(text)));
  const open = listed("open"), lines = [];
  for (const { index, cells } of rows) {
    const group = DATA.groups[index], several = group.runs.length > 1;
    const more = several ? el("button", { type: "button", class: "more", "aria-expanded": String(open.has(index)), onclick: () => {
      toggle("open", index); redraw(); document.querySelector(`tr[data-group="${index}"] .more`).focus();
    } }, `${open.has(index) ? "▾" : "▸"} ${group.counted.length === group.runs.length ? group.runs.length : `${group.counted.length} of ${group.runs.length}`} runs`) : null;
    lines.push(el("tr", { "data-group": index }, el("th", { scope: "row" }, el("span", { class: "name" }, key(index), el("span", {}, group.label)), more, state(group.status)), values(cells.slice(1))));
    if (several && open.has(index)) {
      for (const i of group.runs) {
        const run = DATA.runs[i];
        lines.push(el("tr", { class: "single" }, el("th", { scope: "row" }, run.seed === null ? run.name : `seed ${run.seed}, ${run.name}`, state(run.status)), values(between(run.cells, costs([i], field, target)))));
      }
    }
  }
  return scroller("Results", el("table", { id: "table" }, el("thead", {}, el("tr", {}, header)), el("tbody", {}, lines)));
}

/* -- curves ----------------------------------------------------------------------------------------------------- */

function curves() {
  const legend = el("ul", { class: "legend", "aria-label": "Methods: click to hide or show" }), empty = el("p", { class: "empty" }, "No round has been evaluated yet. Curves appear after the first evaluation.");
  const [left, accuracy] = chart("Accuracy"), [right, loss] = chart("Loss"), grid = el("div", { class: "grid" }, left, right), note = el("p", { class: "hint" });
  const [below, cost] = chart("Final accuracy against uploads"), costNote = el("p", { class: "hint" });
  const fresh = () => { choose("zoom", ""); redraw(); };
  const seeds = DATA.groups.some((group) => group.runs.length > 1) ? segments("Show", "view", { mean: "Mean and standard deviation", single: "Individual runs" }, "mean") : null;
  const all = check("all values", "full", fresh);
  const controls = el("div", { class: "controls" }, segments("Accuracy", "accuracy", ACCURACY, "personalized_accuracy", () => { choose("target", ""); fresh(); }), segments("Loss", "loss", losses(), "minibatch_loss", fresh),
    segments("Against", "x", X, "round", fresh), seeds, check("logarithmic loss", "log", fresh), all);
  section("curves", "Curves", controls, legend, empty, grid, note, below, costNote);
  redraws.push(() => {
    const rounds = has("round"), xKey = chosen("x", Object.keys(X), "round"), view = chosen("view", ["mean", "single"], "mean"), now = shown();
    const [a, l] = [chosen("accuracy", Object.keys(ACCURACY), "personalized_accuracy"), chosen("loss", Object.keys(losses()), "minibatch_loss")];
    const [full, log] = ["full", "log"].map((name) => choices.get(name) === "1");
    empty.hidden = rounds;
    grid.hidden = legend.hidden = controls.hidden = below.hidden = !rounds;
    legend.replaceChildren(...members().map((i) => el("li", {}, el("button", { type: "button", "aria-pressed": String(now.includes(i)), onclick: () => {
      const place = members().indexOf(i); toggle("hide", i); redraw(); legend.children[place].firstChild.focus();
    } }, key(i), DATA.groups[i].label))));
    if (!rounds) return;
    const silent = now.filter((i) => parts(DATA.groups[i], view).some(({ series }) => series.mb && !series.mb[series.mb.length - 1]));
    const dotted = silent.length ? `${silent.map((i) => DATA.groups[i].label).join(", ")}: uploads nothing; the dotted line is its last value. ` : "";
    const drawn = curvesOf(now, l, view), most = full || log ? null : ceiling(drawn.map(({ series }) => series[l]));
    const beyond = most ? drawn.map(({ index, series }) => [index, Math.max(...series[l])]).filter(([, top]) => top > most[1]) : [];
    const outside = beyond.map(([i, top]) => `${DATA.groups[i].label} (up to ${top.toPrecision(3)})`);
    note.textContent = (xKey === "mb" ? dotted : "") + (outside.length ? `Above the plot of the loss: ${outside.join(", ")}. Tick “all values” to see it.` : "");
    const zoom = (choices.get("zoom") || "").split("_").map((one) => one.split(",").map(Number));
    const ranged = (i) => (zoom[i] && zoom[i].length === 4 && zoom[i].every(Number.isFinite) ? [{ range: zoom[i].slice(0, 2) }, { range: zoom[i].slice(2) }] : [{ autorange: true }, { autorange: true }]);
    const draw = (node, i, traces, yTitle, yaxis) => {
      const [x, y] = ranged(i);
      node.whole = yaxis.range;
      const xaxis = { rangemode: "tozero", ...(xKey === "mb" ? megabyteAxis(members()) : {}), ...x };
      plot(node, traces, layoutOf(X_TITLES[xKey], yTitle, { xaxis, yaxis: { ...yaxis, ...(yaxis.range && y.autorange ? {} : y) } }), `${yTitle} against ${X_TITLES[xKey]}`);
    };
    draw(accuracy, 0, curveTraces(now, a, xKey, view, percent), `${ACCURACY[a].toLowerCase()} accuracy, %`, {});
    const room = most ? 0.05 * (most[1] - most[0]) : 0;
    draw(loss, 1, curveTraces(now, l, xKey, view, (values) => values, most ? most[1] : Infinity), LOSS_TITLES[l], log ? LOG : most ? { type: "linear", range: [most[0] - room, most[1] + room] } : { type: "linear" });
    const low = drawCost(cost, now, a, full);
    costNote.textContent = dotted + (low.length ? `Below the plot, as open triangles: ${low.join(", ")}. Tick “all values” to see them in place.` : "");
    all.hidden = !(full || outside.length || low.length);
    for (const node of [accuracy, loss]) {
      if (node.followed) continue;
      node.followed = true;
      node.on("plotly_relayout", () => choose("zoom", [accuracy, loss].map((one) => {
        const { xaxis, yaxis } = one.layout;
        return xaxis.autorange && (yaxis.autorange || (one.whole && yaxis.range.every((value, i) => value === one.whole[i]))) ? "" : [...xaxis.range, ...yaxis.range].map((value) => Number(value).toPrecision(6)).join(",");
      }).join("_").replace(/^_$/, "")));
    }
  });
}

/* -- panels ----------------------------------------------------------------------------------------------------- */

function clients() {
  panel("clients", "Clients", (body) => {
    const now = shown().filter((i) => DATA.groups[i].counted.some((run) => DATA.runs[run].clients.length));
    if (!now.length) return false;
    const [figure, node] = chart("", "Personalized accuracy of every client at the last evaluated round; a box spans the middle half, its line is the median. Seeds are pooled." + (now.some((i) => DATA.groups[i].robust && DATA.groups[i].robust.used.attack) ? " Hostile clients of a simulated attack are excluded." : ""));
    body.append(figure);
    return drawClients(node, now);
  });
}

function samples() {
  panel("samples", "Samples", (body) => {
    const all = [...new Set(runsOf(members()).map((run) => run.federation))].filter((i) => i !== null && DATA.federations[i].counts.length).map(String);
    if (!all.length) return false;
    const seed = (i) => DATA.runs.find((run) => String(run.federation) === i).seed;
    const at = chosen("federation", all, all[0]), { size, clients: rows, classes, all_classes: total } = DATA.federations[at];
    if (all.length > 1) body.append(el("div", { class: "controls" }, segments("Partition", "federation", Object.fromEntries(all.map((i) => [i, seed(i) === null ? i : `seed ${seed(i)}`])), all[0], () => {
      redraw(); document.querySelector("input[name=federation]:checked").focus();
    })));
    const part = (shownOnes, of, word) => (shownOnes < of ? ` ${shownOnes} of ${of.toLocaleString("en")} ${word} are shown.` : "");
    const [figure, node] = chart("", "How many samples of each class every client has, training and test together; the color is their share of the client's samples." + part(rows.length, size, "clients") + part(classes.length, total, "classes"));
    body.append(figure);
    return drawCounts(node, DATA.federations[at]);
  });
}

function plans() {
  panel("plan", "Factor plan", (body) => {
    const now = members().filter((i) => DATA.groups[i].plan), seen = new Map();
    for (const i of now) {
      const words = JSON.stringify(DATA.groups[i].plan);
      if (seen.has(words)) seen.get(words).push(i); else seen.set(words, [i]);
    }
    if (!now.length) return false;
    body.append(el("p", { class: "hint" }, "The parameters that are sent as CP factors, with their ranks; a parameter without a rank stays dense."));
    for (const [words, indices] of seen) {
      const plan = JSON.parse(words), label = indices.map((i) => DATA.groups[i].label).join("; ");
      body.append(el("h3", {}, label));
      if (typeof plan === "string") { body.append(el("p", { class: "hint" }, `Not shown: ${plan}.`)); continue; }
      const row = (name, shape, rank, dense, factored, kind) => ({ kind, cells: [name, shape, rank === null ? "-" : String(rank), dense.toLocaleString("en"), factored.toLocaleString("en"), (dense / factored).toFixed(2)] });
      body.append(simpleTable(`Factor plan of ${label}`, ["parameter", "shape", "rank", "dense", "factored", "rate"],
        [...plan.rows.map((one) => row(...one)), row("total", "", "", ...plan.total, "total")]));
    }
    return true;
  });
}

function diagnostics() {
  panel("diagnostics", "Diagnostics", (body) => {
    const names = [...new Set(runsOf(shown()).flatMap((run) => Object.keys(run.diagnostics)))];
    if (!names.length) return false;
    const figures = names.map((name) => [name, ...chart(QUANTITIES[name] || name)]);
    body.append(el("p", { class: "hint" }, "The quantities of the paper's convergence analysis, measured during the run; each line is a run."), el("div", { class: "grid" }, figures.map(([, figure]) => figure)));
    return figures.forEach(([name, , node]) => drawDiagnostic(node, shown(), name));
  });
}

function robust() {
  panel("robust", "Robustness", (body) => {
    const now = members().filter((i) => DATA.groups[i].robust);
    if (!now.length) return false;
    const used = (one) => Object.entries(one.used).map(([name, value]) => `${name} ${value}`).join(", ") || "plain average, no attack";
    body.append(simpleTable("Robust settings", ["method", "rejected uploads", "settings"], now.map((i) => ({ cells: [DATA.groups[i].label, DATA.groups[i].robust.rejected.toLocaleString("en"), used(DATA.groups[i].robust)] }))));
    if (shown().some((i) => DATA.groups[i].runs.some((run) => DATA.runs[run].series.rejected))) {
      const [figure, node] = chart("Rejected uploads so far");
      body.append(figure);
      drawSeries(node, shown(), "rejected", "rejected uploads", { rangemode: "tozero" });
    }
    for (const i of now.filter((one) => DATA.groups[one].robust.rules.length)) {
      const { rules, clients: who, others } = DATA.groups[i].robust;
      body.append(el("h3", {}, `${DATA.groups[i].label}: rejected uploads by rule and by client`),
        simpleTable("Rejected by rule", ["rule", "uploads", "first reason"], rules.map(([rule, n, reason]) => ({ cells: [rule, n.toLocaleString("en"), reason] }))),
        simpleTable("Rejected by client", ["client", ...who.map(([client]) => client), ...(others ? ["others"] : [])], [{ cells: ["uploads", ...who.map(([, n]) => n.toLocaleString("en")), ...(others ? [`${others} more clients`] : [])] }]));
    }
    return true;
  });
}

function privacy() {
  panel("privacy", "Privacy", (body) => {
    const now = members().filter((i) => runsOf([i]).some((run) => run.series.epsilon || run.privacy[0] !== null));
    if (!now.length) return false;
    const small = (value) => (value === null ? "-" : value > 0 && value < 1e-3 ? value.toExponential() : String(value));
    const rows = runsOf(now).map((run) => ({ cells: [run.name, ...run.privacy.map(small), run.cells[0][1]] }));
    body.append(el("p", { class: "hint" }, "Upper bound on what the run reveals about a single client: (ε, δ) differential privacy spent so far."), simpleTable("Privacy spent", ["run", "ε", "δ", DATA.columns[0]], rows));
    if (!shown().some((i) => runsOf([i]).some((run) => run.series.epsilon))) return true;
    const [figure, node] = chart("ε spent");
    body.append(figure);
    return drawSeries(node, shown(), "epsilon", "ε", { rangemode: "tozero" });
  });
}

/* -- configuration and versions --------------------------------------------------------------------------------- */

function marked(toml, differing) {
  let where = "";
  return toml.split("\n").flatMap((text) => {
    const open = /^\[([^\]]+)\]$/.exec(text.trim());
    if (open) where = open[1];
    const name = `${where}.${text.split("=")[0].trim()}`;
    return [differing.has(name) ? el("mark", {}, text) : text, "\n"];
  });
}

function configuration() {
  panel("configuration", "Configuration", (body) => {
    const now = members();
    /* A hyper-parameter that only one method has does not count as a difference. */
    const differs = ({ key: name, values, seed }) => !seed && new Set(now.map((i) => values[i]).filter((value) => value || !name.startsWith("algorithm."))).size > 1;
    const differing = DATA.settings.filter(differs), files = now.flatMap((i) => DATA.groups[i].runs);
    const rows = (choices.get("all") === "1" ? DATA.settings : differing).filter(({ values }) => now.some((i) => values[i]));
    if (now.length > 1) {
      const some = differing.length ? `The methods differ in ${count(differing.length, "key")}.` : "The methods differ only in their seeds.";
      body.append(el("p", { class: "hint" }, some), el("div", { class: "controls" }, check("all keys", "all")));
      if (rows.length) body.append(simpleTable("Configuration", ["key", ...now.map((i) => DATA.groups[i].label)], rows.map((row) => ({ kind: differs(row) ? "differs" : "same", cells: [row.key, ...now.map((i) => row.values[i])] }))));
    }
    const names = new Set(differing.map((row) => row.key)), open = listed("files");
    const file = (i) => el("details", { open: open.has(i), ontoggle: (event) => { if (event.target.open !== listed("files").has(i)) toggle("files", i); } },
      el("summary", {}, DATA.runs[i].path), el("pre", { tabindex: "0" }, marked(DATA.runs[i].toml, names)));
    if (files.length === 1) body.append(el("pre", { tabindex: "0", "aria-label": "config.toml" }, DATA.runs[files[0]].toml));
    else body.append(el("h3", {}, "config.toml"), ...files.map(file));
    return true;
  });
}

function versions() {
  panel("versions", "Versions and devices", (body) => {
    const runs = runsOf(members()), names = [...new Set(runs.flatMap((run) => Object.keys(run.versions)))];
    const version = (run, name) => (name === "commit" ? (run.versions[name] || "-").replace(/^([0-9a-f]{10})[0-9a-f]+/, "$1") : run.versions[name] || "-");
    const titles = ["seed", "status", "rounds", "device", ...names, "last written"];
    const rows = runs.map((run) => [run.seed === null ? "-" : String(run.seed), run.status, `${run.rounds}${run.planned ? ` of ${run.planned}` : ""}`, run.device || "-", ...names.map((name) => version(run, name)), run.changed]);
    /* What is the same for all runs is said once. */
    const same = titles.map((_, i) => i > 1 && rows.length > 1 && rows.every((row) => row[i] === rows[0][i])), shared = titles.filter((_, i) => same[i]);
    if (shared.length) body.append(el("p", { class: "hint" }, `All runs: ${shared.map((title) => `${title} ${rows[0][titles.indexOf(title)]}`).join(", ")}.`));
    const rest = (row) => row.filter((_, i) => !same[i]);
    body.append(simpleTable("Versions and devices", ["run", ...rest(titles)], rows.map((row, i) => ({ cells: [runs[i].path, ...rest(row)] }))));
    if (runs.some((run) => !Object.keys(run.versions).length)) body.append(el("p", { class: "hint" }, "A run writes its versions and device when it ends."));
    return true;
  });
}

head();
notices();
results();
curves();
clients();
samples();
plans();
diagnostics();
robust();
privacy();
configuration();
versions();
document.getElementById("foot").append(`tdpfed ${DATA.version}, ${DATA.made}. This file is self-contained.`);
redraw();
document.documentElement.dataset.ready = "true";
