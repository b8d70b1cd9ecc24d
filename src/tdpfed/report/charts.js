"use strict";
/* Charts: converts the page's data and the reader's choices to plotly traces. */

const DATA = JSON.parse(document.getElementById("data").textContent);

const ACCURACY = { personalized_accuracy: "Personalized", local_accuracy: "Local", global_accuracy: "Global" };
const LOSS = { loss: "Training", personalized_loss: "Personalized", global_loss: "Global" };
const X = { round: "Rounds", mb: "Uploaded MB", seconds: "Seconds" };
const X_TITLES = { round: "communication round", mb: "uploaded megabytes, all clients together", seconds: "seconds" };
const LOSS_TITLES = { loss: "training loss", personalized_loss: "held-out loss, personalized", global_loss: "held-out loss, global" };
const QUANTITIES = {
  gradient_norm: "squared gradient norm in the factors (Theorem 1a)",
  distance: "squared distance, personalized to global (Theorem 1b)",
  diversity: "diversity of the clients' gradients (Lemma 2)",
  drift: "drift of the gradients over local rounds (Lemma 4)",
};

/* Color, marker and, from the eighth group on, dash: no two groups differ by color alone. */
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const SHAPES = {
  circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", square: "M-3.5,-3.5H3.5V3.5H-3.5Z", diamond: "M0,-4.8L4.8,0L0,4.8L-4.8,0Z",
  "triangle-up": "M0,-4.5L4.5,3.5H-4.5Z", cross: "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
  x: "M-4,-2.2L-2.2,-4L0,-1.8L2.2,-4L4,-2.2L1.8,0L4,2.2L2.2,4L0,1.8L-2.2,4L-4,2.2L-1.8,0Z", pentagon: "M0,-4.6L4.4,-1.4L2.7,3.8H-2.7L-4.4,-1.4Z",
};
const SVG_DASHES = { solid: "", dash: "6 4", dot: "1.5 3", dashdot: "6 3 1.5 3", longdash: "10 4" };

/* A group's position within its data set determines its style. */
const PLACE = DATA.groups.map((group, i) => DATA.groups.slice(0, i).filter((other) => other.dataset === group.dataset).length);

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function look(index) {
  const i = PLACE[index];
  return { color: css(`--c${i % 7}`), symbol: SYMBOLS[i % 7], dash: DASHES[Math.floor(i / 7) % 5] };
}

/* plotly interprets some HTML in texts: escape names from run folders. */
function plain(text) { return String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;"); }

function faded(hex, alpha) { return hex + Math.round(255 * alpha).toString(16).padStart(2, "0"); }

function percent(values) { return values.map((value) => (value === null ? null : 100 * value)); }

function layoutOf(xTitle, yTitle, extra = {}) {
  const axis = { gridcolor: css("--rule"), linecolor: css("--rule"), zeroline: false, automargin: true, tickcolor: css("--rule") };
  const title = (text) => ({ text, standoff: 8, font: { size: 13 } });
  return {
    paper_bgcolor: css("--bg"), plot_bgcolor: css("--bg"), showlegend: false, hovermode: "closest",
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: css("--fg") },
    margin: { l: 50, r: 12, t: 10, b: 44 },
    hoverlabel: { bgcolor: css("--soft"), bordercolor: css("--rule"), font: { color: css("--fg") }, align: "left", namelength: -1 },
    ...extra,
    xaxis: { ...axis, title: title(xTitle), ...extra.xaxis },
    yaxis: { ...axis, title: title(yTitle), ...extra.yaxis },
  };
}

const CONFIG = {
  displaylogo: false, responsive: true, displayModeBar: matchMedia("(hover: hover)").matches ? "hover" : false, doubleClick: "reset",
  modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
};

function plot(node, traces, layout, words) {
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", words);
  const name = words.replace(/[^A-Za-z0-9]+/g, "-").slice(0, 60).toLowerCase();
  Plotly.react(node, traces, layout, { ...CONFIG, toImageButtonOptions: { filename: name, scale: 2 } });
}

function line(index, x, y, more) {
  const { color, symbol, dash } = look(index);
  return {
    type: "scatter", mode: x.length > 1 ? "lines+markers" : "markers", x, y, name: plain(DATA.groups[index].label), connectgaps: false,
    line: { color, dash, width: 2 }, marker: { color, symbol, size: 7, maxdisplayed: 9 }, ...more,
  };
}

/* The curves of a group: its mean with a band of one standard deviation, or each of its runs. */
function parts(group, view) {
  if (view === "mean" && group.mean) return [{ series: group.mean, spread: group.spread, name: `mean of ${group.counted.length} runs` }];
  const runs = view === "mean" ? group.counted : group.runs;
  return runs.map((i) => ({ series: DATA.runs[i].series, name: DATA.runs[i].name }));
}

function curveTraces(shown, field, xKey, view, scale) {
  const traces = [], levels = [];
  let farthest = 0;
  for (const index of shown) {
    for (const { series, spread, name } of parts(DATA.groups[index], view)) {
      if (!series[field] || !series[xKey]) continue;
      const x = series[xKey], y = scale(series[field]);
      if (xKey === "mb" && !x[x.length - 1]) { levels.push([index, y[y.length - 1], name]); continue; }
      farthest = Math.max(farthest, x[x.length - 1]);
      if (spread && spread[field]) {
        const half = scale(spread[field]), fill = faded(look(index).color, 0.16);
        const edge = (sign) => y.map((value, i) => (value === null || half[i] === null ? null : value + sign * half[i]));
        const band = { type: "scatter", mode: "lines", x, line: { width: 0 }, hoverinfo: "skip" };
        traces.unshift({ ...band, y: edge(1), fill: "tonexty", fillcolor: fill });
        traces.unshift({ ...band, y: edge(-1) });
      }
      traces.push(line(index, x, y, {
        customdata: series.round, hovertemplate: `%{y:.4~g} at round %{customdata}<br>${plain(name)}<extra>${plain(DATA.groups[index].label)}</extra>`,
        ...(view === "mean" ? {} : { opacity: 0.8, line: { ...line(index, x, y).line, width: 1.4 } }),
      }));
    }
  }
  /* A method that uploads nothing has no curve over megabytes: draw a horizontal line at its last value. */
  for (const [index, value, name] of levels) {
    traces.push(line(index, [0, farthest || 1], [value, value], {
      mode: "lines", line: { color: look(index).color, dash: "dot", width: 2 },
      hovertemplate: `%{y:.4~g}, last value; uploads nothing<br>${plain(name)}<extra>${plain(DATA.groups[index].label)}</extra>`,
    }));
  }
  return traces;
}

/* A client's id, unless the page has only quantiles of all clients. */
function clientName(run, client) {
  const { ids, size } = DATA.federations[run.federation] || { ids: [] };
  return ids.length === run.clients.length ? `client ${ids[client]}` : size > run.clients.length ? "a client" : `client ${client}`;
}

function clientTraces(shown) {
  return [...shown].reverse().map((index) => {
    const group = DATA.groups[index], { color, symbol } = look(index), values = [], names = [];
    for (const i of group.counted) {
      const run = DATA.runs[i];
      run.clients.forEach((accuracy, client) => {
        if (accuracy !== null) { values.push(100 * accuracy); names.push(`${plain(clientName(run, client))}, ${plain(run.name)}`); }
      });
    }
    return {
      type: "box", orientation: "h", x: values, y: values.map(() => String(index)), text: names, name: plain(group.label),
      boxpoints: values.length <= 300 ? "all" : "outliers", jitter: 0.6, pointpos: 0, width: 0.6, fillcolor: faded(color, 0.12),
      line: { color, width: 1.5 }, marker: { color, symbol, size: 5, opacity: 0.75 }, hovertemplate: "%{x:.2f} %<br>%{text}<extra></extra>",
    };
  });
}

function short(text, most) { return text.length > most ? `${text.slice(0, most - 1)}…` : text; }

function drawClients(node, shown) {
  const traces = clientTraces(shown), most = node.clientWidth < 500 ? 14 : 34;
  node.style.height = `${70 + 44 * shown.length}px`;
  const ticks = { tickvals: shown.map(String), ticktext: shown.map((i) => plain(short(DATA.groups[i].label, most))) };
  const rows = { type: "category", showgrid: false, categoryorder: "array", categoryarray: [...shown].reverse().map(String), ...ticks };
  plot(node, traces, layoutOf("personalized accuracy, %", "", { yaxis: rows }), "Accuracy of each client");
}

/* Classes by client: the color is the share of the client's samples, the number how many there are. */
function drawCounts(node, { clients, classes, counts }) {
  const most = node.clientWidth < 500 ? 14 : 34, every = Math.ceil(clients.length / 60), written = counts.length <= 60 && classes.length <= 20;
  const share = counts.map((row) => { const all = row.reduce((sum, n) => sum + n, 0); return row.map((n) => (n ? n / all : null)); });
  const hover = counts.map((row, k) => row.map((n, c) => `client ${plain(clients[k])}, class ${plain(classes[c])}:<br>${count(n, "sample")}, ${(100 * (share[k][c] || 0)).toFixed(1)} % of its own`));
  node.style.height = `${90 + Math.max(120, Math.min(1100, clients.length * (written ? 19 : 13)))}px`;
  const ticks = clients.map((_, k) => k).filter((k) => k % every === 0);
  const trace = {
    type: "heatmap", z: share, zmin: 0, zmax: Math.max(...share.flat()), text: hover, hovertemplate: "%{text}<extra></extra>", xgap: written ? 1 : 0, ygap: written ? 1 : 0,
    colorscale: [[0, css("--soft")], [1, css("--c0")]], colorbar: { title: { text: "share" }, tickformat: ".0%", outlinewidth: 0, thickness: 12, len: 1 },
  };
  const label = (n, c, k) => ({ x: c, y: k, text: n.toLocaleString("en"), showarrow: false, font: { size: 10, color: share[k][c] > 0.6 * trace.zmax ? css("--bg") : css("--fg") } });
  plot(node, [trace], layoutOf("class", "client", {
    xaxis: { showgrid: false, side: "bottom", ...(classes.length <= 40 ? { tickvals: classes.map((_, c) => c), ticktext: classes.map((name) => plain(short(spelled(name), 14))) } : {}) },
    yaxis: { showgrid: false, autorange: "reversed", tickvals: ticks, ticktext: ticks.map((k) => plain(short(clients[k], most))) },
    annotations: written ? counts.flatMap((row, k) => row.flatMap((n, c) => (n ? [label(n, c, k)] : []))) : [],
  }), "Samples of each class and client");
}

function spelled(name) { return { "\n": "⏎", " ": "␣" }[name] || name; }

function drawSeries(node, shown, field, yTitle, yaxis) {
  const traces = shown.flatMap((index) => DATA.groups[index].runs
    .filter((i) => DATA.runs[i].series[field])
    .map((i) => line(index, DATA.runs[i].series.round, DATA.runs[i].series[field], { hovertemplate: `%{y:.4~g} at round %{x}<extra>${plain(DATA.runs[i].name)}</extra>` })));
  plot(node, traces, layoutOf(X_TITLES.round, yTitle, { yaxis }), `${yTitle} against rounds`);
}

function drawDiagnostic(node, shown, quantity) {
  const traces = shown.flatMap((index) => DATA.groups[index].runs
    .filter((i) => DATA.runs[i].diagnostics[quantity])
    .map((i) => {
      const { round, value } = DATA.runs[i].diagnostics[quantity];
      return line(index, round, value, { hovertemplate: `%{y:.3~e} at round %{x}<extra>${plain(DATA.runs[i].name)}</extra>` });
    }));
  const values = traces.flatMap((trace) => trace.y).filter((value) => value > 0), wide = Math.max(...values) > 6 * Math.min(...values);
  const yaxis = { type: "log", minorloglabels: "complete", tickformat: "~g", ...(wide ? { dtick: "D2" } : {}) };
  plot(node, traces, layoutOf(X_TITLES.round, plain(quantity.replace(/_/g, " ")), { yaxis }), `${quantity} against rounds`);
}
