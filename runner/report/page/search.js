  // ---- searches: drawn once, since the controls choose runs and not trials --------------------------------------

  const BEST = "#d55e00", PROMOTED = "#0072b2", AXIS = 84;  // the least width of an axis of parallel coordinates
  const written = (value) => { const rounded = Number(value.toPrecision(4)), size = Math.abs(rounded); return size && (size < 1e-3 || size >= 1e6) ? rounded.toExponential() : String(rounded); };
  const lastOf = ({ results }) => (results.length && results[results.length - 1][1] !== null ? results[results.length - 1] : null);
  const isWide = (values) => Math.min(...values) > 0 && Math.max(...values) > 100 * Math.min(...values);
  const counted = (count, what, one = what) => count + " " + (count === 1 ? one : what);
  // Return the ends of an interval, and between them 1, 2 and 5 times each power of 10, or only 1 times it if there are many.
  function logTicks(low, high) {
    const from = Math.floor(Math.log10(low)), powers = Math.ceil(Math.log10(high)) - from + 1;
    const all = Array.from({ length: powers }, (_, i) => (powers <= 4 ? [1, 2, 5] : [1]).map((digit) => Number(digit + "e" + (from + i)))).flat();
    return [low, ...all.filter((value) => value > 1.3 * low && value < high / 1.3), high];
  }
  function logDimension(label, values, low, high) {
    const ticks = logTicks(low, high);
    return { label, values: values.map(Math.log10), range: [Math.log10(low), Math.log10(high)], tickvals: ticks.map(Math.log10), ticktext: ticks.map(written) };
  }
  function parallelDimensions(search, lines) {
    const found = search.dimensions.map(({ name, texts, range, log }, i) => {
      const label = escaped(shortened(name, 16)), values = lines.map((line) => line.at[i]);
      if (texts.length) return { label, values, range: [-0.3, texts.length - 0.7], tickvals: texts.map((_, at) => at), ticktext: texts.map((one) => shortened(one, 12)) };
      return log ? logDimension(label, values, ...range) : { label, values, range };
    });
    const steps = lines.map((line) => lastOf(line)[0]), results = lines.map((line) => lastOf(line)[1]);
    if (new Set(steps).size > 1) {
      const ticks = [...new Set(steps)].sort((a, b) => a - b);
      found.push({ label: "step", values: steps, ...(ticks.length <= 8 ? { tickvals: ticks, ticktext: ticks.map(String) } : {}) });
    }
    const label = escaped(shortened(search.metric, 16));
    found.push(isWide(results) ? logDimension(label, results, Math.min(...results), Math.max(...results)) : { label, values: results });
    return found;
  }
  // Draw a plot with a title, a sentence below it and perhaps a legend. Without traces, write only title and sentence.
  function searchPlot(grid, { title, note = "", traces = [], layout = {}, entries = [], width = 0 }) {
    const figure = make("figure"), frame = make("div"), plot = make("div", "", "plot"), list = make("ul", "", "legend");
    list.id = "search-legend-" + document.querySelectorAll(".search figure").length;
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", title);
    plot.style.minWidth = width + "px";
    frame.style.overflowX = "auto"; frame.tabIndex = width ? 0 : -1;
    frame.append(plot);
    figure.append(make("figcaption", title), ...(traces.length ? [frame] : []), list, make("p", note, "hint"));
    grid.append(figure);
    legend(list.id, entries);
    return () => { if (traces.length) Plotly.react(plot, traces, { ...LAYOUT, hovermode: "closest", ...layout }, PLAIN); };
  }
  function parallelPlot(search) {
    const lines = search.lines.filter(lastOf), dimensions = parallelDimensions(search, lines), color = dimensions[dimensions.length - 1].values;
    const line = { color, colorscale: SCALE.map((each, i) => [i / (SCALE.length - 1), each]), cmin: Math.min(...color), cmax: Math.max(...color) };
    const left = Math.max(45, 15 + 6 * Math.max(...(dimensions[0].ticktext || []).map((each) => each.length)));
    return { title: "Settings and the last result of each trial", traces: lines.length ? [{ type: "parcoords", dimensions, line, labelfont: { size: 12 }, labelside: "top" }] : [],
      layout: { margin: { l: left, r: 50, t: 45, b: 20 } }, width: AXIS * dimensions.length,
      note: lines.length ? "A line for each trial, from purple for low results to olive for high ones." + (search.rungs > 1 ? " The step is that of the result: results at different steps are not comparable." : "") + " Drag along an axis to choose lines." : "No trial has a finite result yet." };
  }
  function importancePlot(search) {
    const { step, results, needed, shares } = search.importance, title = "Importance of each setting", where = step === null ? "at the end of the runs" : "at step " + step;
    if (!shares.length) return { title, note: "Left out: it needs " + needed + " finite results at the same rung, and there are " + results + "." };
    const bars = shares.map((value, i) => ({ value, name: search.dimensions[i].name })), shown = bars.filter(({ value }) => value !== null).sort((a, b) => a.value - b.value);
    const none = bars.filter(({ value }) => value === null).map(({ name }) => name).join(", ");
    return { title, traces: [{ type: "bar", orientation: "h", x: shown.map(({ value }) => value), y: shown.map((_, i) => i), text: shown.map(({ name, value }) => escaped(name) + ": " + share(value)), textposition: "none", hovertemplate: "%{text}<extra></extra>", marker: { color: PROMOTED } }],
      layout: { bargap: 0.4, margin: { ...LAYOUT.margin, l: 10, r: 30 }, xaxis: { range: [0, 1.001], dtick: 0.25, tickformat: ".0%", gridcolor: GRID, title: { text: "share of variance explained" } },
        yaxis: { tickvals: shown.map((_, i) => i), ticktext: shown.map(({ name }) => escaped(shortened(name, 14))), range: [-0.7, Math.max(shown.length - 0.3, 2.3)], automargin: true, ticklabelstandoff: 4, title: { text: "setting", standoff: 8 } } },
      note: "The share of the variance of the ranks of " + counted(results, "results", "result") + " " + where + " that each setting explains by itself, between bins of its values, corrected for their number. What settings do only together is not in it, and with few results it is a rough guess." +
        (none ? " Not for " + none + ": every trial has a value of its own." : "") };
  }
  function resultAxis(search, values) {
    return { type: isWide(values) ? "log" : "linear", gridcolor: GRID, zeroline: false, title: { text: escaped(search.metric) } };
  }
  function bestPlot(search) {
    const found = search.best_so_far, title = "Best result so far", last = found[found.length - 1];
    if (!last) return { title, note: "No trial has a finite result yet." };
    const texts = found.map(({ trial, step, value }) => "trial " + trial + " at step " + step + ": " + written(value));
    const line = { type: "scatter", mode: "lines+markers", x: [...found.map(({ steps }) => steps), search.steps], y: [...found, last].map(({ value }) => value), text: [...texts, texts[texts.length - 1]],
      line: { shape: "hv", color: PROMOTED, width: 2 }, marker: { size: [...found.map(() => 8), 0], opacity: 1, line: { width: 0 } }, cliponaxis: false, hovertemplate: "%{x} steps trained<br>%{text}<extra></extra>" };
    return { title, traces: [line], layout: { xaxis: { rangemode: "tozero", gridcolor: GRID, zeroline: false, title: { text: "steps trained, of all trials" } }, yaxis: resultAxis(search, line.y) },
      note: search.rungs > 1 ? "Of the best trial at the highest rung with a result, so it can become worse when the first trial reaches a higher rung." : "" };
  }
  function rungsPlot(search) {
    const title = "Results at each rung", kinds = [["not promoted", PALE, 1, (line) => !line.promoted && line.trial !== search.best], ["promoted", PROMOTED, 2, (line) => line.promoted && line.trial !== search.best], ["the best", BEST, 3.5, (line) => line.trial === search.best]];
    if (search.rungs < 2) return { title, note: "Left out: the trials have one result each, at their end." };
    const traces = [], entries = [], all = search.lines.flatMap(({ results }) => results).filter(([, value]) => value !== null);
    for (const [label, color, width, fits] of kinds) {
      const lines = search.lines.filter((line) => line.results.some(([, value]) => value !== null) && fits(line)), points = lines.flatMap((line) => [...line.results.map((result) => [...result, line]), [null, null, line]]);
      if (!lines.length) continue;
      traces.push({ type: "scatter", mode: "lines+markers", x: points.map(([step]) => step), y: points.map(([, value]) => value), connectgaps: false, line: { color, width }, marker: { color, size: 4 + 1.5 * width },
        text: points.map(([, value, line]) => (value === null ? "" : "trial " + line.trial + ": " + written(value) + "<br>" + line.values.map((set, i) => escaped(search.dimensions[i].name + "=" + shortened(set, 40))).join("<br>"))), hovertemplate: "step %{x}, %{text}<extra></extra>" });
      entries.push({ label, color });
    }
    const steps = [...new Set(all.map(([step]) => step))];
    return { title, traces, entries, note: traces.length ? "" : "No trial has a finite result yet.",
      layout: { xaxis: { gridcolor: GRID, zeroline: false, title: { text: "step of the rung" }, ...(steps.length <= 6 ? { tickvals: steps } : {}) }, yaxis: resultAxis(search, all.map(([, value]) => value)) } };
  }
  function drawSearch(search) {
    const section = make("section", "", "search"), first = make("div", "", "panels one"), rest = make("div", "", "panels"), title = make("h2", "Search " + search.name);
    rest.style.gridTemplateColumns = "repeat(auto-fit, minmax(min(100%, 24rem), 1fr))";  // three in a row
    const lost = [[search.diverged, "diverged"], [search.failed, "failed"]].filter(([count]) => count).map((part) => part.join(" ")).join(" and ");
    const point = make("p", search.summary, "hint");
    title.style.overflowWrap = point.style.overflowWrap = "anywhere";
    section.append(title, point, make("p", lost ? "Only finite results are drawn: of " + counted(search.lines.length, "trials", "trial") + ", " + lost + "." : "", "hint"), first, rest);
    element("settings-section").before(section);
    const draw = [searchPlot(first, parallelPlot(search)), ...[importancePlot, bestPlot, rungsPlot].map((plot) => searchPlot(rest, plot(search)))];
    for (const each of draw) each();  // only when all are placed and have their widths
  }
  data.searches.forEach(drawSearch);
