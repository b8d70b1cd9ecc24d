"use strict";
/* Charts: converts the page's data and the reader's choices to plotly traces. */

const DATA = JSON.parse(document.getElementById("data").textContent);

const ACCURACY = { personalized_accuracy: "Personalized", local_accuracy: "Local", global_accuracy: "Global" };
const LOSS = { minibatch_loss: "Minibatch", personalized_loss: "Personalized", global_loss: "Global", personalized_train_loss: "Personalized, training data", global_train_loss: "Global, training data" };
const X = { round: "Rounds", mb: "Uploaded MB", seconds: "Seconds" };
const X_TITLES = { round: "communication round", mb: "uploaded megabytes, all clients together", seconds: "seconds" };
const LOG = { type: "log", minorloglabels: "complete", tickformat: "~g" };
const LOSS_TITLES = { minibatch_loss: "loss on the last minibatch", personalized_loss: "held-out loss, personalized", global_loss: "held-out loss, global", personalized_train_loss: "training loss, personalized", global_train_loss: "training loss, global" };
/* The losses that a run has values of. */
const losses = () => Object.fromEntries(Object.entries(LOSS).filter(([field]) => field === "minibatch_loss" || DATA.runs.some(({ series }) => series[field])));
const QUANTITIES = {
  gradient_norm: "squared gradient norm in the factors (Theorem 1a)",
  distance: "squared distance, personalized to global (Theorem 1b)",
  diversity: "diversity of the clients' gradients (Lemma 2)",
  drift: "drift of the gradients over local rounds (Lemma 4)",
};

const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross", "x", "pentagon"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const SHAPES = {
  circle: "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0Z", square: "M-3.5,-3.5H3.5V3.5H-3.5Z", diamond: "M0,-4.8L4.8,0L0,4.8L-4.8,0Z",
  "triangle-up": "M0,-4.5L4.5,3.5H-4.5Z", cross: "M-1.5,-4.5h3v3h3v3h-3v3h-3v-3h-3v-3h3Z",
  x: "M-4,-2.2L-2.2,-4L0,-1.8L2.2,-4L4,-2.2L1.8,0L4,2.2L2.2,4L0,1.8L-2.2,4L-4,2.2L-1.8,0Z", pentagon: "M0,-4.6L4.4,-1.4L2.7,3.8H-2.7L-4.4,-1.4Z",
};
const SVG_DASHES = { solid: "", dash: "6 4", dot: "1.5 3", dashdot: "6 3 1.5 3", longdash: "10 4" };

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function look(index) {
  const { color, marker, dash } = DATA.groups[index].look;
  return { color: css(`--c${color}`), symbol: SYMBOLS[marker], dash: DASHES[dash] };
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

/* The megabytes that each curve ends at, and the axis for them: logarithmic if they differ more than tenfold. */
function megabyteAxis(indices) {
  const ends = indices.flatMap((index) => DATA.groups[index].counted.map((i) => DATA.runs[i].series.mb)).filter(Boolean).map((mb) => mb[mb.length - 1]).filter((mb) => mb > 0);
  return Math.max(...ends) > 10 * Math.min(...ends) ? LOG : {};
}

function curvesOf(shown, field, view) {
  return shown.flatMap((index) => parts(DATA.groups[index], view).filter(({ series }) => series[field]).map((part) => ({ index, ...part })));
}

/* Where an axis ends if a few far higher values would squash the rest; the same rule as in report/look.py. */
function ceiling(curves) {
  const known = curves.map((curve) => curve.filter((value) => value !== null)).filter((curve) => curve.length);
  if (!known.length) return null;
  const lowest = Math.min(...known.flat()), highest = Math.max(...known.flat());
  const high = (curve) => Math.max(curve[0], [...curve].sort((a, b) => a - b)[Math.ceil((19 * (curve.length - 1)) / 20)]);
  const tops = known.map(high), last = end(tops.map((top) => top - lowest), highest - lowest, 0);
  return last ? [lowest, Math.max(...tops.filter((top) => top - lowest <= last))] : null;
}

function floor(finals) {
  const highest = Math.max(...finals), last = end(finals.map((one) => highest - one), highest - Math.min(...finals), 5);
  return last === null ? null : Math.min(...finals.filter((one) => highest - one <= last));
}

function end(tops, highest, least) {
  const ranked = [...tops].sort((a, b) => b - a), bulk = Math.max(ranked[ranked.length < 2 ? 0 : Math.max(1, Math.floor(ranked.length / 3))], least);
  return highest > 5 * bulk ? Math.max(...ranked.filter((top) => top <= 5 * bulk)) : null;
}

function curveTraces(shown, field, xKey, view, scale, most = Infinity) {
  const traces = [], levels = [], starts = [], ends = [];
  for (const { index, series, spread, name } of curvesOf(shown, field, view)) {
    if (!series[xKey]) continue;
    const x = series[xKey], y = scale(series[field]);
    if (xKey === "mb" && !x[x.length - 1]) { levels.push([index, y[y.length - 1], name]); continue; }
    starts.push(x[0]);
    ends.push(x[x.length - 1]);
    if (spread && spread[field] && Math.max(...y) <= most) {
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
  /* A method that uploads nothing has no curve over megabytes: draw a horizontal line at its last value. */
  const from = megabyteAxis(shown) === LOG ? Math.min(...starts) : 0, to = ends.length ? Math.max(...ends) : 1;
  return [...traces, ...levels.map(([index, value, name]) => level(index, from, to, value, name))];
}

function level(index, from, to, value, name) {
  return line(index, [from, to], [value, value], {
    mode: "lines", line: { color: look(index).color, dash: "dot", width: 2 },
    hovertemplate: `%{y:.4~g}, last value; uploads nothing<br>${plain(name)}<extra>${plain(DATA.groups[index].label)}</extra>`,
  });
}

/* The final accuracy of each group against its megabytes; an outlier is drawn as an open triangle at the lower edge. */
function drawCost(node, shown, field, all) {
  const points = shown.flatMap((index) => {
    const last = DATA.groups[index].counted.map((i) => DATA.runs[i].series).filter((series) => series[field] && series[field][series[field].length - 1] !== null);
    if (!last.length) return [];
    const [accuracy, up] = [field, "mb"].map((name) => moments(last.map((series) => series[name][series[name].length - 1])));
    return [{ index, mean: 100 * accuracy[0], spread: 100 * accuracy[1], mb: up[0], mbSpread: up[1] }];
  });
  const lowest = all || !points.length ? null : floor(points.map(({ mean }) => mean)), sent = points.filter(({ mb }) => mb > 0), axis = megabyteAxis(shown);
  const span = sent.length ? [Math.min(...sent.map(({ mb }) => mb)), Math.max(...sent.map(({ mb }) => mb))] : [0, 1];
  const kept = points.filter(({ mean }) => lowest === null || mean >= lowest), highest = Math.max(...kept.map(({ mean }) => mean));
  const edge = lowest === null ? null : lowest - 0.12 * Math.max(highest - lowest, 1);
  const traces = points.map(({ index, mean, spread, mb, mbSpread }) => {
    const { color, symbol } = look(index), below = lowest !== null && mean < lowest, y = below ? edge : mean, label = plain(DATA.groups[index].label);
    if (!mb) return level(index, axis === LOG ? span[0] / 1.5 : 0, axis === LOG ? span[1] * 1.5 : span[1], y, "");
    const bar = (array) => ({ type: "data", array: [array], thickness: 1.2, width: 4, color });
    return {
      type: "scatter", mode: "markers", x: [mb], y: [y], name: label, marker: { color, symbol: below ? "triangle-down-open" : symbol, size: below ? 11 : 10 },
      ...(below ? {} : { error_y: bar(spread), error_x: bar(mbSpread) }), hovertemplate: `${mean.toFixed(2)} %, ${mb.toPrecision(4)} MB<extra>${label}</extra>`,
    };
  });
  const yaxis = lowest === null ? {} : { range: [edge - 0.05 * (highest - edge), highest + 0.08 * (highest - edge)] };
  plot(node, traces, layoutOf(X_TITLES.mb, `${ACCURACY[field].toLowerCase()} accuracy, %`, { xaxis: axis === LOG ? LOG : { rangemode: "tozero" }, yaxis }), "Final accuracy against uploaded megabytes");
  return points.filter(({ mean }) => lowest !== null && mean < lowest).map(({ index, mean }) => `${DATA.groups[index].label} (${mean.toFixed(1)} %)`);
}

/* Mean and sample standard deviation. */
function moments(values) {
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return [mean, Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1 || 1))];
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
  const yaxis = { ...LOG, ...(wide ? { dtick: "D2" } : {}) };
  plot(node, traces, layoutOf(X_TITLES.round, plain(quantity.replace(/_/g, " ")), { yaxis }), `${quantity} against rounds`);
}
