"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  // Okabe and Ito's colors, which people with any color vision tell apart; without their yellow, too pale on white.
  const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  // Part of viridis, for settings that are numbers: from small to large, also without color vision.
  const SCALE = ["#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#c9bd10"];
  const PALE = "rgba(120,130,140,0.35)";
  const MOST_COLORED = 8;
  const BUCKET_COLORS = {
    start: "#56b4e9", restore: "#cc79a7", useful: "#009e73", repeated: "#d55e00", save: "#e69f00",
    data: "#0072b2", evaluation: "#8d8a77", end: "#b9bfc6", queue: "#dfe3e8", hold: "#c9ced6",
  };
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const PLAIN = { ...CONFIG, displayModeBar: false };  // its buttons would cover what is drawn
  const LAYOUT = { margin: { l: 60, r: 20, t: 10, b: 45 }, font: { family: "system-ui, sans-serif", size: 12 },
    paper_bgcolor: "#fff", plot_bgcolor: "#fff", hoverlabel: { namelength: -1 }, showlegend: true,
    legend: { orientation: "h", y: -0.18 } };

  const state = { metric: data.metric, x: "step", by: data.by, filter: "", sort: "rank", down: false,
    chosen: -1, logx: false, logy: false };

  // ---- numbers ------------------------------------------------------------------------------------------------

  function bytes(text) {
    const raw = atob(text), out = new Uint8Array(raw.length);
    for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
    return out.buffer;
  }
  const decoded = new Map();
  function series(run, name) {
    const key = run.index + "/" + name;
    if (!decoded.has(key)) {
      const found = run.series[name];
      decoded.set(key, found ? { x: Array.from(new Uint32Array(bytes(found[0]))), y: Array.from(new Float32Array(bytes(found[1]))) } : null);
    }
    return decoded.get(key);
  }
  function interpolate(curve, x) {
    const xs = curve.x;
    if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return NaN;
    let low = 0, high = xs.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    if (xs[high] === xs[low]) return curve.y[low];
    return curve.y[low] + (curve.y[high] - curve.y[low]) * (x - xs[low]) / (xs[high] - xs[low]);
  }
  function curve(run, name) {
    const found = series(run, name);
    if (!found) return null;
    if (state.x === "step") return found;
    const axis = series(run, state.x);
    if (!axis) return null;
    return { x: found.x.map((step) => interpolate(axis, step)), y: found.y };
  }
  function text(value) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value)) return String(value);
    const size = Math.abs(value);
    return size >= 1e-3 && size < 1e5 ? value.toFixed(4) : value.toExponential(3);
  }
  // Plotly reads names and titles as a kind of HTML.
  const escaped = (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value === undefined ? null : value));
  const lower = (metric) => data.lower[metric] !== false;
  // The beginning and, rather, the end: that is where the names of a sweep differ.
  function shortened(name, most = 56) {
    const start = Math.floor(most / 3);
    return name.length > most ? name.slice(0, start) + "…" + name.slice(start + 1 - most) : name;
  }
  function result(run, which) { const found = run.metrics[state.metric]; return found ? found[which] : null; }
  function hours(seconds) {
    return seconds >= 3600 ? (seconds / 3600).toFixed(1) + " h" : seconds >= 60 ? (seconds / 60).toFixed(1) + " min" : seconds.toFixed(1) + " s";
  }

  // ---- which runs ---------------------------------------------------------------------------------------------

  data.runs.forEach((run, index) => {
    run.index = index;
    run.words = [run.name, run.state, ...Object.entries(run.settings).map(([key, value]) => key + "=" + asText(value))].join(" ").toLowerCase();
  });
  // A setting that is a number is compared as one: seed=1 is not seed=10, and lr=1e-3 is lr=0.001.
  function matches(run, word) {
    const [, key, value] = /^([^=]+)=(.+)$/.exec(word) || [], number = Number(value);
    const having = key && Number.isFinite(number) ? Object.entries(run.settings).filter(([name, set]) => typeof set === "number" && name.toLowerCase().endsWith(key)) : [];
    return having.length ? having.some(([, set]) => Math.abs(set - number) <= 1e-9 * Math.abs(number)) : run.words.includes(word);
  }
  function visible() {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    return data.runs.filter((run) => words.every((word) => matches(run, word)));
  }
  function ranked(runs) {
    const sign = lower(state.metric) ? 1 : -1;
    const value = (run) => { const best = result(run, 1); return best === null ? Infinity : sign * best; };
    return [...runs].sort((a, b) => value(a) - value(b) || a.index - b.index);
  }
  state.chosen = data.runs.length ? ranked(data.runs)[0].index : -1;
  function groups(runs) {
    const found = new Map();
    for (const run of runs) {
      const values = state.by.map((name) => run.settings[name]), key = values.map(asText).join(", ");
      if (!found.has(key)) found.set(key, { values, key, runs: [], name: state.by.map((name, i) => data.short[name] + "=" + asText(values[i])).join(", ") });
      found.get(key).runs.push(run);
    }
    const order = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : (typeof b === "number") - (typeof a === "number") || asText(a).localeCompare(asText(b), undefined, { numeric: true }));
    return [...found.values()].sort((a, b) => a.values.map((value, i) => order(value, b.values[i])).find(Boolean) || 0);
  }
  function groupStyles(list) {
    const numeric = list.length > 2 && list.every((group) => group.values.length === 1 && typeof group.values[0] === "number");
    return list.map((_, i) => (numeric
      ? [SCALE[Math.round(i * (SCALE.length - 1) / (list.length - 1))], "solid"]
      : [COLORS[i % COLORS.length], DASHES[Math.floor(i / COLORS.length) % DASHES.length]]));
  }
  // A run keeps its color while the filter changes: by its rank among all runs.
  function runColors() {
    const found = new Map();
    ranked(data.runs).slice(0, MOST_COLORED).forEach((run, i) => found.set(run.index, [COLORS[i % COLORS.length], DASHES[Math.floor(i / COLORS.length)]]));
    return found;
  }

  // ---- curves -------------------------------------------------------------------------------------------------

  function axes(layout) {
    const titles = { step: "step", tokens_seen: "tokens", samples_seen: "samples", hours: "hours of training" };
    layout.xaxis = { title: { text: titles[state.x] }, type: state.logx ? "log" : "linear", gridcolor: "#eef0f3", zeroline: false };
    layout.yaxis = { title: { text: escaped(state.metric) }, type: state.logy ? "log" : "linear", gridcolor: "#eef0f3", zeroline: false };
    return layout;
  }
  // The curve of a branch begins where it left its trunk, if that is shown as well.
  function own(run, found, names) {
    if (!found || !run.fork || !names.has(run.fork.run)) return found;
    const at = series(run, state.metric).x, first = Math.max(at.findIndex((step) => step >= run.fork.step), 0);
    return { x: found.x.slice(first), y: found.y.slice(first) };
  }
  function drawCurves() {
    const runs = visible(), traces = [];
    let hint = "";
    if (state.by.length) {
      const list = groups(runs), styles = groupStyles(list);
      list.forEach((group, i) => traces.push(...band(group, ...styles[i])));
      hint = "Mean over the finished runs of each group that have this metric, as far as the shortest of them goes; the band is one standard deviation. In a group without a finished run, over all that have not failed.";
    } else {
      const colors = runColors(), many = runs.length > MOST_COLORED;
      const gl = runs.length * 400 > 60000 ? "scattergl" : "scatter";
      const order = many ? [...runs].sort((a, b) => colors.has(a.index) - colors.has(b.index)) : runs;
      const names = new Set(runs.map((run) => run.name.split("/").pop()));
      for (const run of order) {
        const found = own(run, curve(run, state.metric), names);
        if (!found) continue;
        const chosen = run.index === state.chosen && data.runs.length > 1;
        const color = colors.get(run.index);
        traces.push({ type: gl, mode: found.x.length < 25 ? "lines+markers" : "lines", x: found.x, y: found.y, name: escaped(shortened(run.name) + (run.finished ? "" : " (" + run.state + ")")), meta: escaped(run.name),
          line: { color: color ? color[0] : chosen ? "#000" : PALE, dash: color ? color[1] : "solid", width: chosen ? 3.5 : color ? 1.8 : 1 },
          marker: { size: 5 }, showlegend: Boolean(color) || chosen || !many, connectgaps: false,
          hovertemplate: "%{x}: %{y:.5g}<extra>%{meta}</extra>" });
      }
      if (many) hint = "The " + MOST_COLORED + " best by " + state.metric + " have colors; the others are gray. Click a row below to highlight it, or group by a setting.";
    }
    element("curves-hint").textContent = traces.length ? hint : "No run that is shown has " + state.metric + " by " + state.x + ".";
    Plotly.react("curves", traces, axes({ ...LAYOUT, hovermode: "closest" }), CONFIG);
  }
  function band(group, color, dash) {
    const curves = (runs) => runs.map((run) => curve(run, state.metric)).filter((one) => one && one.x.length);
    const finished = curves(group.runs.filter((run) => run.finished));
    const found = finished.length ? finished : curves(group.runs.filter((run) => !run.failed));
    if (!found.length) return [];
    const lastOf = (one) => one.x[one.x.length - 1];
    const longest = found.reduce((a, b) => (lastOf(b) > lastOf(a) ? b : a)), end = Math.min(...found.map(lastOf));
    const xs = longest.x.filter((x) => x < end).concat(end), mean = [], high = [], low = [];
    for (const x of xs) {
      const values = found.map((one) => interpolate(one, x)).filter(Number.isFinite);
      const middle = values.reduce((a, b) => a + b, 0) / values.length;
      const spread = values.length > 1 ? Math.sqrt(values.reduce((a, b) => a + (b - middle) ** 2, 0) / (values.length - 1)) : 0;
      mean.push(values.length ? middle : null); high.push(values.length ? middle + spread : null); low.push(values.length ? middle - spread : null);
    }
    const name = group.name + " (" + found.length + (found.length === 1 ? " run)" : " runs)");
    const common = { legendgroup: group.key, x: xs, hoverinfo: "skip", showlegend: false, mode: "lines", line: { width: 0, color } };
    return [{ ...common, y: low }, { ...common, y: high, fill: "tonexty", fillcolor: color + "30" },
      { x: xs, y: mean, name: escaped(name), legendgroup: group.key, mode: xs.length < 25 ? "lines+markers" : "lines", line: { color, dash, width: 2 },
        hovertemplate: "%{x}: %{y:.5g}<extra>%{fullData.name}</extra>" }];
  }

  // ---- tables -------------------------------------------------------------------------------------------------

  function cell(row, value, kind) {
    const made = row.insertCell();
    made.textContent = text(value);
    if (kind) made.className = kind;
    if (typeof value === "string" && value.length > 40) made.title = value;
    return made;
  }
  function head(table, titles) {
    table.textContent = "";
    const row = table.createTHead().insertRow();
    for (const [title, kind, action] of titles) {
      const made = document.createElement("th");
      made.textContent = title;
      if (kind) made.className = kind;
      if (action) made.addEventListener("click", action);
      row.appendChild(made);
    }
    return table.createTBody();
  }
  function sortBy(key) { state.down = state.sort === key ? !state.down : false; state.sort = key; drawRuns(); }
  function drawRuns() {
    const colors = runColors(), arrow = (key) => (state.sort === key ? (state.down ? " ▾" : " ▴") : "");
    const columns = [
      ["rank", "rank", "number", null], ["run", "name", "", (run) => run.name], ["state", "state", "", (run) => run.state],
      ["step", "steps", "number", (run) => run.steps],
      ...data.keys.filter((key) => key !== "fork").map((key) => [data.short[key], "setting " + key, typeof firstSetting(key) === "number" ? "number" : "", (run) => run.settings[key], asText]),
      [state.metric, "last", "number", (run) => result(run, 0), (last, run) => (last === null && result(run, 1) !== null ? "not finite" : last)], ["best", "best", "number", (run) => result(run, 1)],
      ["at step", "best step", "number", (run) => result(run, 2)], ["attempts", "attempts", "number", (run) => run.attempts.length || null],
      ...(data.runs.some((run) => run.ranks) ? [["ranks", "ranks", "number", (run) => run.ranks || 1]] : []),
      ["useful", "useful", "number", (run) => run.useful, share],
    ];
    const body = head(element("runs"), columns.map(([title, key, kind]) => [title + arrow(key), kind, () => sortBy(key)]));
    const order = ranked(visible()), rank = new Map(order.map((run, i) => [run.index, i + 1]));
    const column = columns.find(([, key]) => key === state.sort);
    if (column && column[3]) order.sort((a, b) => compare(column[3](a), column[3](b)));
    if (state.down) order.reverse();
    const most = element("runs").parentElement.clientWidth < 900 ? 28 : 48;
    for (const run of order) {
      const row = body.insertRow();
      row.classList.toggle("chosen", run.index === state.chosen);
      row.addEventListener("click", () => choose(run.index));
      for (const [title, key, kind, value, write] of columns) {
        const content = key === "rank" ? rank.get(run.index) : value(run);
        const made = cell(row, write && content !== undefined ? write(content, run) : content, kind);
        if (key === "name") label(made, run, colors, most);
        if (key === "state") { made.className = "state-" + run.state.replace(/ /g, "-"); made.title = run.reason || ""; }
      }
    }
    element("shown").textContent = order.length + " of " + data.runs.length + " runs";
  }
  const share = (value) => (value === null || value === undefined ? "" : (100 * value).toFixed(1) + " %");
  function firstSetting(key) { const run = data.runs.find((one) => key in one.settings); return run && run.settings[key]; }
  function compare(a, b) {
    const empty = (value) => value === null || value === undefined || value === "";
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    return typeof a === "number" && typeof b === "number" ? a - b : asText(a).localeCompare(asText(b), undefined, { numeric: true });
  }
  function label(made, run, colors, most) {
    made.textContent = shortened(run.name, most);
    made.title = run.name;
    const color = colors.get(run.index), mark = document.createElement("span");
    mark.className = "swatch";
    mark.style.background = color && !state.by.length ? color[0] : "#d5d9de";
    made.prepend(mark);
    if (run.fork) { made.prepend("└ "); made.title += "\nfork of " + run.fork.run + " at step " + run.fork.step; }
  }
  function drawGroups() {
    element("groups-section").hidden = !state.by.length;
    if (!state.by.length) return;
    const list = groups(visible()), styles = groupStyles(list);
    const names = data.metrics.filter((name) => !name.includes("/"));
    const shown = [...(data.metrics.includes(state.metric) ? [state.metric] : []), ...names.filter((name) => name !== state.metric)].slice(0, 8);
    const body = head(element("groups"), [[state.by.map((name) => data.short[name]).join(", "), ""], ["runs", "number"], ["left out", ""], ...shown.map((name) => [name, "number"])]);
    list.forEach((group, i) => {
      const row = body.insertRow(), first = cell(row, group.key);
      const mark = document.createElement("span");
      mark.className = "swatch"; mark.style.background = styles[i][0]; first.prepend(mark);
      cell(row, group.runs.length, "number");
      cell(row, leftOut(group.runs));
      for (const name of shown) {
        const { values, at } = compared(group.runs, name);
        const mean = values.reduce((a, b) => a + b, 0) / values.length;
        const spread = Math.sqrt(values.reduce((a, b) => a + (b - mean) ** 2, 0) / (values.length - 1));
        cell(row, values.length ? text(mean) + (values.length > 1 ? " ± " + text(spread) : "") + at : "", "number");
      }
    });
  }
  function leftOut(runs) {
    const failed = runs.filter((run) => run.failed).length, others = runs.filter((run) => !run.failed && !run.finished).length;
    const why = [[failed, "failed"], [others, "not finished"]].filter(([count]) => count).map((part) => part.join(" ")).join(", ");
    return why && failed + others + " of " + runs.length + ": " + why;
  }
  // The last values of finished runs; of runs of different lengths, those at the largest step that all have a value for.
  function compared(runs, name) {
    const found = runs.filter((run) => run.finished && run.metrics[name] && series(run, name));
    const curves = found.map((run) => series(run, name)), last = new Set(curves.map((one) => one.x[one.x.length - 1]));
    if (last.size < 2) return { values: found.map((run) => run.metrics[name][0]).filter(Number.isFinite), at: "" };
    const common = curves.map((one) => new Set(one.x)).reduce((a, b) => new Set([...a].filter((step) => b.has(step))));
    const step = [...common].reduce((a, b) => Math.max(a, b), -1);
    return { values: curves.map((one) => one.y[one.x.indexOf(step)]).filter(Number.isFinite), at: " at step " + step };
  }

  // ---- one run ------------------------------------------------------------------------------------------------

  function choose(index) {
    state.chosen = index;
    element("one").value = String(index);
    drawCurves(); drawRuns(); drawOne();
  }
  function drawOne() {
    const run = data.runs[state.chosen];
    if (!run) return;
    const prefix = state.metric + "_by_source/";
    const names = Object.keys(run.series).filter((name) => name.startsWith(prefix));
    const traces = names.map((name, i) => {
      const found = curve(run, name);
      return found && { x: found.x, y: found.y, name: escaped(name.slice(prefix.length)), mode: found.x.length < 25 ? "lines+markers" : "lines",
        line: { color: COLORS[i % COLORS.length], dash: DASHES[Math.floor(i / COLORS.length) % DASHES.length], width: 1.6 } };
    }).filter(Boolean);
    drawFacts(run);
    plotOrNothing("sources", traces, axes({ ...LAYOUT, title: { text: escaped(state.metric) + " by source", font: { size: 13 } }, margin: { ...LAYOUT.margin, t: 35 } }));
    drawMixture(run);
  }
  function drawFacts(run) {
    const body = head(element("facts"), [["", ""], ["", ""]]);
    const facts = [["state", run.state + (run.reason ? ": " + run.reason : "")], ["steps", run.steps]];
    if (run.fork) facts.push(["fork of", run.fork.run + " at step " + run.fork.step]);
    for (const key of data.keys) if (key in run.settings && key !== "fork") facts.push([key, asText(run.settings[key])]);
    for (const name of data.metrics.filter((name) => !name.includes("/") && run.metrics[name])) {
      const [last, best, step] = run.metrics[name];
      facts.push([name, (last === null ? "not finite" : text(last)) + (best === null ? "" : ", best " + text(best) + " at step " + step)]);
    }
    for (const [name, value] of facts) { const row = body.insertRow(); cell(row, name); cell(row, value); }
  }
  function drawMixture(run) {
    const pattern = /^sources\/(.*)\/samples$/;
    const found = Object.keys(run.series).map((name) => [pattern.exec(name), name]).filter(([match]) => match)
      .map(([match, name]) => ({ name: match[1], at: series(run, name) }));
    const layout = axes({ ...LAYOUT, title: { text: "Shares of the mixture", font: { size: 13 } }, margin: { ...LAYOUT.margin, t: 35 } });
    layout.yaxis = { ...layout.yaxis, type: "linear", title: { text: "share of samples" }, range: [0, 1], tickformat: ".0%" };
    if (found.length < 2) { plotOrNothing("mixture", [], layout); return; }
    const xs = found.reduce((a, b) => (b.at.x.length > a.at.x.length ? b : a)).at.x, last = xs.length - 1, points = Math.min(80, last);
    const edges = Array.from({ length: points + 1 }, (_, i) => xs[Math.round(i * last / points)]);
    const traces = found.map(({ name, at }, i) => ({ name: escaped(name), stackgroup: "one", x: [], y: [], mode: "lines", line: { width: 0.5, color: COLORS[i % COLORS.length] } }));
    const axis = state.x === "step" ? null : series(run, state.x);
    for (let i = 0; i < edges.length; i++) {
      const from = i ? edges[i - 1] : 0, to = edges[i];
      const given = found.map(({ at }) => interpolate(at, to) - (i ? interpolate(at, from) : 0));
      const sum = given.reduce((a, b) => a + b, 0);
      traces.forEach((trace, k) => { trace.x.push(axis ? interpolate(axis, to) : to); trace.y.push(sum ? given[k] / sum : 0); });
    }
    plotOrNothing("mixture", traces, layout);
  }
  function plotOrNothing(id, traces, layout, config = CONFIG) {
    element(id).classList.toggle("nothing", !traces.length);
    if (traces.length) Plotly.react(id, traces, layout, config);
    else Plotly.purge(id);
  }

  // ---- time line and goodput ----------------------------------------------------------------------------------

  const ENDS = { finished: ["#009e73", "circle"], killed: ["#d55e00", "x"], crash: ["#d55e00", "x"], failed: ["#d55e00", "x"],
    hang: ["#d55e00", "x"],
    preempted: ["#e69f00", "triangle-right"], requeued: ["#e69f00", "triangle-right"], "time limit": ["#e69f00", "triangle-right"],
    interrupted: ["#56b4e9", "triangle-right"], cancelled: ["#8d8a77", "square"] };
  const MOST_LINES = 200;
  // The names of runs beside bars: as wide as they need, but the bars get more than half of the page.
  function beside(labels, id) {
    const width = Math.min(360, 12 + 6.2 * Math.max(...labels.map((label) => label.length), 1), 0.4 * element(id).clientWidth);
    return { width, tickvals: [...labels], ticktext: labels.map((label) => escaped(shortened(label, Math.floor((width - 12) / 6.2)))) };
  }
  function drawTimeline() {
    const runs = visible().filter((run) => run.attempts.length).slice(0, MOST_LINES);
    const labels = runs.map((run) => run.name), traces = [];
    const bars = { type: "bar", orientation: "h", base: [], x: [], y: [], text: [], textposition: "none", marker: { color: "#b7c4d1" }, name: "attempt",
      hovertemplate: "%{text}<extra></extra>" };
    const marks = {};
    runs.forEach((run) => {
      for (const attempt of run.attempts) {
        const length = (attempt.ended - attempt.started) * 1000;
        bars.base.push(attempt.started * 1000); bars.x.push(Math.max(length, 1)); bars.y.push(run.name);
        bars.text.push("attempt " + attempt.attempt + ": steps " + attempt.start_step + " to " + attempt.end_step + ", " + hours(length / 1000) + (attempt.ranks > 1 || run.ranks ? ", " + attempt.ranks + (attempt.ranks === 1 ? " rank" : " ranks") : "") + ", " + escaped(attempt.cause));
        const how = attempt.cause;
        (marks[how] = marks[how] || { x: [], y: [], text: [] });
        marks[how].x.push(attempt.ended * 1000); marks[how].y.push(run.name);
        marks[how].text.push(escaped(how) + " at step " + attempt.end_step + (attempt.steps_lost ? ", " + attempt.steps_lost + " steps to repeat" : ""));
      }
      for (const event of run.events) {
        (marks[event.kind] = marks[event.kind] || { x: [], y: [], text: [] });
        marks[event.kind].x.push(event.time * 1000); marks[event.kind].y.push(run.name); marks[event.kind].text.push(escaped(event.text));
      }
    });
    traces.push(bars);
    for (const [kind, at] of Object.entries(marks)) {
      const [color, symbol] = ENDS[kind] || (kind === "evaluation" ? ["#000000", "line-ns-open"] : ["#cc79a7", "diamond"]);
      traces.push({ type: "scatter", mode: "markers", name: escaped(kind), ...at, marker: { color, symbol, size: kind === "evaluation" ? 8 : 9 }, hovertemplate: "%{text}<extra></extra>" });
    }
    const height = Math.max(160, 90 + 20 * labels.length), { width, ...ticks } = beside(labels, "timeline-section");
    element("timeline").style.height = height + "px";
    plotOrNothing("timeline", labels.length ? traces : [], { ...LAYOUT, height, barmode: "overlay", bargap: 0.45, margin: { l: width, r: 20, t: 10, b: 60 },
      xaxis: { type: "date", gridcolor: "#eef0f3", tickangle: 0, nticks: Math.max(2, Math.floor((element("timeline-section").clientWidth - width) / 110)) }, yaxis: { type: "category", categoryarray: labels.reverse(), categoryorder: "array", automargin: false, range: [-0.7, labels.length - 0.3], tickfont: { size: 11 },
        ...ticks },
      hovermode: "closest", legend: { orientation: "h", y: -60 / height } }, PLAIN);
  }
  function drawGoodput() {
    const runs = visible(), all = Object.keys(data.buckets), sum = Object.fromEntries(all.map((bucket) => [bucket, 0]));
    for (const run of runs) for (const bucket of all) sum[bucket] += run.seconds[bucket] || 0;
    const allocated = all.filter((bucket) => !data.waiting.includes(bucket));
    const whole = allocated.reduce((a, bucket) => a + sum[bucket], 0);
    const bars = [["all that are shown", sum], ...Object.entries(data.weeks).map(([week, seconds]) => [week, seconds])];
    if (runs.length <= 40 && runs.length > 1) bars.push(...runs.map((run) => [run.name, run.seconds]));
    bars.reverse();
    const traces = allocated.map((bucket) => ({ type: "bar", orientation: "h", name: data.buckets[bucket], y: bars.map(([name]) => name),
      x: bars.map(([, seconds]) => { const total = allocated.reduce((a, each) => a + (seconds[each] || 0), 0); return total ? (seconds[bucket] || 0) / total : 0; }),
      customdata: bars.map(([, seconds]) => hours(seconds[bucket] || 0)), marker: { color: BUCKET_COLORS[bucket] },
      hovertemplate: "%{x:.1%} (%{customdata})<extra>%{fullData.name}</extra>" }));
    const labels = bars.map(([name]) => name), { width, ...ticks } = beside(labels, "goodput-section"), height = 50 + 22 * bars.length;
    element("goodput").style.height = height + "px";
    plotOrNothing("goodput", whole ? traces : [], { ...LAYOUT, height, barmode: "stack", bargap: 0.3,
      margin: { l: width, r: 20, t: 10, b: 30 }, showlegend: false,
      xaxis: { tickformat: ".0%", range: [0, 1], gridcolor: "#eef0f3" },
      yaxis: { type: "category", ...ticks, tickfont: { size: 11 } } }, PLAIN);
    const body = head(element("goodput-table"), [["node time", ""], ["", "number"], ["share", "number"]]);
    for (const bucket of all) {
      const row = body.insertRow();
      const mark = document.createElement("span");
      mark.className = "swatch"; mark.style.background = BUCKET_COLORS[bucket];
      cell(row, data.buckets[bucket]).prepend(mark); cell(row, hours(sum[bucket]), "number");
      cell(row, data.waiting.includes(bucket) ? "" : share(whole ? sum[bucket] / whole : 0), "number");
    }
  }

  // ---- controls -----------------------------------------------------------------------------------------------

  function options(select, list, value) {
    select.textContent = "";
    for (const [key, label] of list) select.add(new Option(label, key, false, key === value));
  }
  function drawAll() { drawCurves(); drawGroups(); drawRuns(); drawOne(); drawTimeline(); drawGoodput(); }
  function listen(id, event, change) { element(id).addEventListener(event, () => { change(element(id)); drawAll(); }); }

  // What was chosen stays so when the page is reloaded, with other runs in it perhaps.
  const KEPT = "report of " + location.pathname;
  function remember() {
    const run = data.runs[state.chosen];
    try { sessionStorage.setItem(KEPT, JSON.stringify({ ...state, chosen: run ? run.name : "" })); } catch { /* not allowed here */ }
  }
  function recall() {
    if (!performance.getEntriesByType("navigation").some((entry) => entry.type === "reload")) return;
    let kept = null;
    try { kept = JSON.parse(sessionStorage.getItem(KEPT)); } catch { /* not allowed here */ }
    if (!kept) return;
    const chosen = data.runs.findIndex((run) => run.name === kept.chosen);
    if (chosen < 0) delete kept.chosen; else kept.chosen = chosen;
    if (![...data.metrics, ...data.others].includes(kept.metric)) delete kept.metric;
    if (!data.axes.some(([name]) => name === kept.x)) delete kept.x;
    if (!groupings.some((keys) => JSON.stringify(keys) === JSON.stringify(kept.by))) delete kept.by;
    Object.assign(state, kept);
  }
  const isZoomed = () => { const { xaxis, yaxis } = element("curves").layout; return xaxis.autorange === false || yaxis.autorange === false; };

  const groupings = [[], ...data.combined, ...data.keys.map((key) => [key])];
  recall();
  addEventListener("pagehide", remember);
  if (data.refresh) setInterval(() => { if (!isZoomed()) location.reload(); }, 1000 * data.refresh);

  document.title = "Report: " + data.title;
  element("title").textContent = data.title;
  element("summary").textContent = data.summary;
  element("forks-section").hidden = !data.forks.length;
  element("forks").textContent = data.forks.join("\n");
  options(element("metric"), [...data.metrics, ...data.others].map((name) => [name, name]), state.metric);
  options(element("x"), data.axes, state.x);
  const nameOf = (keys) => (keys.length > 1 ? keys.map((key) => data.short[key]).join(" and ") : keys[0] || "(nothing: one curve per run)");
  options(element("by"), groupings.map((keys) => [JSON.stringify(keys), nameOf(keys)]), JSON.stringify(state.by));
  options(element("one"), data.runs.map((run) => [String(run.index), run.name]), String(state.chosen));
  element("logx").checked = state.logx;
  element("logy").checked = state.logy;
  element("filter").value = state.filter;
  listen("metric", "change", (made) => { state.metric = made.value; });
  listen("x", "change", (made) => { state.x = made.value; });
  listen("by", "change", (made) => { state.by = JSON.parse(made.value); });
  listen("logx", "change", (made) => { state.logx = made.checked; });
  listen("logy", "change", (made) => { state.logy = made.checked; });
  listen("filter", "input", (made) => { state.filter = made.value; });
  element("one").addEventListener("change", (event) => choose(Number(event.target.value)));
  drawAll();
  document.body.dataset.drawn = "yes";
})();
