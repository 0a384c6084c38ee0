  // The page's data, the user's choices (kept in the address), and numbers. All scripts of this folder are joined to one
  // function: see SCRIPTS in page.py.
  const data = JSON.parse(document.getElementById("data").textContent);
  const element = (id) => document.getElementById(id);
  // The colors of Okabe and Ito for any color vision, darkened for a contrast of 3 to 1 on white.
  const COLORS = ["#0072b2", "#d55e00", "#008a66", "#b35c92", "#a87400", "#2f8fc4", "#000000"];
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  // Like viridis, for numeric settings and results: from small to large, readable without color vision.
  const SCALE = ["#440154", "#414487", "#2a788e", "#1c8a68", "#558a1e", "#8f7d00"];
  const PALE = "#8b949d";
  const GRID = "#eef0f3";
  const MOST_COLORED = 8;
  const MOST_DRAWN = 100;  // runs up to which the loss panel and all curves are drawn by default
  const CONFIG = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const PLAIN = { ...CONFIG, displayModeBar: false };  // the buttons would cover the plot
  const LAYOUT = { margin: { l: 60, r: 15, t: 10, b: 40 }, font: { family: "system-ui, sans-serif", size: 12, color: "#1d2329" },
    paper_bgcolor: "#fff", plot_bgcolor: "#fff", hoverlabel: { namelength: -1 }, showlegend: false };
  const single = data.runs.length === 1;

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
      const found = run.series[name] || run.hardware[name];
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
  // Return the exponential moving average without a bias towards 0 at the start, as in W&B and TensorBoard.
  function smoothed(ys) {
    if (!state.smooth) return ys;
    let sum = 0, weight = 0;
    return ys.map((y) => {
      if (!Number.isFinite(y)) return y;
      sum = state.smooth * sum + (1 - state.smooth) * y;
      weight = state.smooth * weight + 1 - state.smooth;
      return sum / weight;
    });
  }
  function curve(run, name) {
    const found = series(run, name), axis = state.x === "step" ? null : series(run, state.x);
    if (!found || (state.x !== "step" && !axis)) return null;
    return { x: axis ? found.x.map((step) => interpolate(axis, step)) : found.x, y: smoothed(found.y) };
  }
  function text(value) {
    if (value === null || value === undefined) return "";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value)) return String(value);
    const size = Math.abs(value);
    return size >= 1e-3 && size < 1e5 ? value.toFixed(4) : value.toExponential(3);
  }
  // Escape names and titles, which Plotly interprets as a kind of HTML.
  const escaped = (value) => String(value).replace(/&/g, "&amp;").replace(/</g, "&lt;");
  const asText = (value) => (typeof value === "string" ? value : JSON.stringify(value === undefined ? null : value));
  const share = (value) => (value === null || value === undefined ? "" : (100 * value).toFixed(1) + " %");
  const lower = (metric) => data.lower[metric] !== false;
  // Keep the beginning and more of the end, where the names of a sweep differ.
  function shortened(name, most = 56) {
    const start = Math.floor(most / 3);
    return name.length > most ? name.slice(0, start) + "…" + name.slice(start + 1 - most) : name;
  }
  function result(run, which, metric = state.metric) { const found = run.metrics[metric]; return found ? found[which] : null; }
  const isResult = (metric) => data.results.includes(metric);
  function hours(seconds) {
    return seconds >= 3600 ? (seconds / 3600).toFixed(1) + " h" : seconds >= 60 ? (seconds / 60).toFixed(1) + " min" : seconds.toFixed(1) + " s";
  }
  // Return the peak of memory, or the median of any other number.
  function used(run, name) {
    const found = series(run, name), values = found ? found.y.filter(Number.isFinite).sort((a, b) => a - b) : [];
    return values.length ? values[name.includes("memory") ? values.length - 1 : values.length >> 1] : null;
  }
  function compare(a, b) {
    const empty = (value) => value === null || value === undefined || value === "";
    if (empty(a) || empty(b)) return empty(a) - empty(b);
    return typeof a === "number" && typeof b === "number" ? a - b : asText(a).localeCompare(asText(b), undefined, { numeric: true });
  }

  // ---- what is chosen, which the address holds ----------------------------------------------------------------

  const plottable = [...data.metrics, ...data.others, ...data.hardware];
  function firstPanels() {
    const others = single ? [...data.results, ...data.metrics, ...data.others] : data.runs.length <= MOST_DRAWN ? ["loss"] : [];
    return [...new Set(others)].filter((name) => plottable.includes(name) && name !== data.metric && !name.includes("/")).slice(0, 5);
  }
  const DEFAULTS = { metric: data.metric || plottable[0] || "loss", x: "step", by: data.by, filter: "", sort: "rank", down: false, run: "", beside: "",
    logx: false, logy: false, smooth: 0, panels: firstPanels(), columns: null, media: "", at: -1, setting: "" };
  const state = { ...DEFAULTS };
  const groupings = [[], ...data.combined, ...data.keys.map((key) => [key])];
  const runNamed = (name) => data.runs.find((run) => run.name === name);

  function remember() {
    const kept = new URLSearchParams();
    for (const [key, usual] of Object.entries(DEFAULTS)) {
      if (JSON.stringify(state[key]) !== JSON.stringify(usual)) kept.set(key, typeof usual === "string" ? state[key] : JSON.stringify(state[key]));
    }
    history.replaceState(null, "", "#" + kept);
  }
  // Read the choices from the address, which may be old or typed: ignore choices that do not fit.
  function recall() {
    const kept = new URLSearchParams(location.hash.slice(1)), lists = (value) => Array.isArray(value) && value.every((one) => typeof one === "string");
    const fits = { metric: (value) => plottable.includes(value), x: (value) => data.axes.some(([name]) => name === value), by: (value) => groupings.some((keys) => JSON.stringify(keys) === JSON.stringify(value)),
      run: runNamed, beside: runNamed, panels: (value) => lists(value) && value.every((name) => plottable.includes(name)), columns: lists,
      smooth: (value) => value >= 0 && value < 1, at: Number.isInteger };
    Object.assign(state, DEFAULTS);
    for (const [key, usual] of Object.entries(DEFAULTS)) {
      if (!kept.has(key)) continue;
      let value = kept.get(key);
      try { if (typeof usual !== "string") value = JSON.parse(value); } catch { continue; }
      if (!fits[key] || fits[key](value)) state[key] = value;
    }
  }

  // ---- which runs ---------------------------------------------------------------------------------------------

  // Leave out the hash at the end of a name if the rest is unique.
  const withoutHash = (name) => name.replace(/-[0-9a-f]{8}$/, ""), sharing = Object.create(null);
  for (const { name } of data.runs) sharing[withoutHash(name)] = (sharing[withoutHash(name)] || 0) + 1;
  data.runs.forEach((run, index) => {
    run.index = index;
    run.label = sharing[withoutHash(run.name)] > 1 ? run.name : withoutHash(run.name);
    if (run.state !== "unreadable") for (const key of data.keys) if (!(key in run.settings) && key in data.common.settings) run.settings[key] = data.common.settings[key];
    run.words = [run.name, run.state, ...data.keys.filter((key) => key in run.settings).map((key) => key + "=" + asText(run.settings[key]))].join(" ").toLowerCase();
  });
  // Compare numeric settings as numbers: seed=1 is not seed=10, and lr=1e-3 is lr=0.001.
  function matches(run, word) {
    const [, key, value] = /^([^=]+)=(.+)$/.exec(word) || [], number = Number(value);
    const having = key && Number.isFinite(number) ? Object.entries(run.settings).filter(([name, set]) => typeof set === "number" && name.toLowerCase().endsWith(key)) : [];
    return having.length ? having.some(([, set]) => Math.abs(set - number) <= 1e-9 * Math.abs(number)) : run.words.includes(word);
  }
  function visible() {
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    return data.runs.filter((run) => words.every((word) => matches(run, word)));
  }
  // Rank by the chosen metric, or by the page's metric if the choice is no result.
  function ranked(runs) {
    const metric = isResult(state.metric) ? state.metric : data.metric, sign = lower(metric) ? 1 : -1;
    const value = (run) => { const best = result(run, 1, metric); return best === null ? Infinity : sign * best; };
    return [...runs].sort((a, b) => value(a) - value(b) || a.index - b.index);
  }
  const chosen = () => runNamed(state.run) || ranked(data.runs)[0];
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
  // Color runs by their rank among all runs, so that a color does not change with the filter.
  function runColors() {
    const found = new Map();
    ranked(data.runs).slice(0, MOST_COLORED).forEach((run, i) => found.set(run.index, [COLORS[i % COLORS.length], DASHES[Math.floor(i / COLORS.length)]]));
    return found;
  }

  // ---- elements -----------------------------------------------------------------------------------------------

  function make(tag, content = "", kind = "") {
    const made = document.createElement(tag);
    made.textContent = content;
    if (kind) made.className = kind;
    return made;
  }
  function drawn(tag, attributes) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }
  function swatch(color, dash = "solid") {
    const made = drawn("svg", { width: 22, height: 10, class: "swatch", "aria-hidden": "true" });
    const line = drawn("line", { x1: 0, x2: 22, y1: 5, y2: 5, stroke: color, "stroke-width": 4 });
    if (dash !== "solid") line.setAttribute("stroke-dasharray", { dash: "7 4", dot: "3 3", dashdot: "8 3 3 3" }[dash]);
    made.append(line);
    return made;
  }
  // Write the legend below a plot, so that it covers nothing. A name may be a button.
  function legend(id, entries) {
    element(id).replaceChildren(...entries.map(({ label, color, dash, title, action, pressed }) => {
      const item = make("li"), inner = make(action ? "button" : "span", label);
      inner.prepend(swatch(color, dash));
      if (title) inner.title = title;
      if (action) { inner.type = "button"; inner.addEventListener("click", action); inner.setAttribute("aria-pressed", String(Boolean(pressed))); }
      item.append(inner);
      return item;
    }));
  }
  function plotOrNothing(id, traces, layout, config = CONFIG) {
    element(id).classList.toggle("nothing", !traces.length);
    if (traces.length) Plotly.react(id, traces, layout, config);
    else Plotly.purge(id);
  }
