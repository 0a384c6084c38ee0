  // ---- curves: one panel for each number ----------------------------------------------------------------------

  function axes(layout, logy = state.logy) {
    const titles = { step: "step", tokens_seen: "tokens", samples_seen: "samples", hours: "hours of training" };
    layout.xaxis = { title: { text: titles[state.x], standoff: 8 }, type: state.logx ? "log" : "linear", gridcolor: GRID, zeroline: false };
    layout.yaxis = { type: logy ? "log" : "linear", gridcolor: GRID, zeroline: false };
    return layout;
  }
  // Begin the curve of a branch at its fork if the trunk is shown as well.
  function own(run, name, found, shown) {
    if (!found || !run.fork || !shown.has(run.fork.index)) return found;
    const first = Math.max(series(run, name).x.findIndex((step) => step >= run.fork.step), 0);
    return { x: found.x.slice(first), y: found.y.slice(first) };
  }
  function runTraces(name, runs) {
    const colors = runColors(), many = runs.length > MOST_COLORED, one = chosen();
    const points = runs.reduce((sum, run) => sum + (series(run, name) ? series(run, name).x.length : 0), 0), gl = points > 60000 ? "scattergl" : "scatter";
    const order = many ? [...runs].sort((a, b) => colors.has(a.index) - colors.has(b.index)) : runs;
    const shown = new Set(runs.map((run) => run.index));
    return order.map((run) => {
      const found = own(run, name, curve(run, name), shown), color = colors.get(run.index), isChosen = run === one && !single;
      if (!found) return null;
      return { type: gl, mode: found.x.length < 25 ? "lines+markers" : "lines", x: found.x, y: found.y, meta: escaped(run.name), index: run.index,
        name: escaped(shortened(run.label) + (run.finished ? "" : " (" + run.state + ")")), marker: { size: 5 }, connectgaps: false,
        line: { color: color ? color[0] : isChosen ? "#000" : PALE, dash: color ? color[1] : "solid", width: isChosen ? 3.5 : color ? 1.8 : 1 },
        showlegend: Boolean(color) || isChosen || !many, hovertemplate: "%{x}: %{y:.5g}<extra>%{meta}</extra>" };
    }).filter(Boolean);
  }
  function band(name, group, color, dash) {
    const curves = (runs) => runs.map((run) => curve(run, name)).filter((one) => one && one.x.length);
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
    const label = group.name + " (" + found.length + (found.length === 1 ? " run)" : " runs)");
    const common = { x: xs, hoverinfo: "skip", showlegend: false, mode: "lines", line: { width: 0, color } };
    return [{ ...common, y: low }, { ...common, y: high, fill: "tonexty", fillcolor: color + "30" },
      { x: xs, y: mean, name: escaped(label), label, mode: xs.length < 25 ? "lines+markers" : "lines", line: { color, dash, width: 2 },
        hovertemplate: "%{x}: %{y:.5g}<extra>%{meta}</extra>", meta: escaped(label) }];
  }
  function tracesOf(name, runs) {
    if (!state.by.length) return runTraces(name, runs);
    const list = groups(runs), styles = groupStyles(list);
    return list.flatMap((group, i) => band(name, group, ...styles[i]));
  }
  // Draw the panels of a section. The first one has the id of the section.
  function drawPanels(place, names, runs) {
    const grid = element(place + "-panels"), found = names.map((name) => tracesOf(name, runs));
    while (grid.children.length > names.length) { Plotly.purge(grid.lastChild.lastChild); grid.lastChild.remove(); }
    names.forEach((name, i) => {
      if (!grid.children[i]) {
        const panel = make("figure"), plot = make("div", "", "plot");
        plot.id = i ? place + "-" + (i + 1) : place;
        plot.setAttribute("role", "img");
        panel.append(make("figcaption"), plot);
        grid.append(panel);
      }
    });
    grid.classList.toggle("one", names.length === 1);
    names.forEach((name, i) => {  // only when all are placed and have their widths
      const [title, plot] = grid.children[i].children;
      title.textContent = name;
      plot.setAttribute("aria-label", name + " by " + state.x + " of " + runs.length + " runs; the tables below have the numbers");
      const logy = state.logy && !data.hardware.includes(name);  // the zoom is kept while the axes are the same
      const layout = axes({ ...LAYOUT, hovermode: "closest", width: plot.clientWidth, height: plot.clientHeight, uirevision: [name, state.x, state.logx, logy].join(" ") }, logy);
      if (name.endsWith("%")) layout.yaxis.rangemode = "tozero";
      Plotly.react(plot, found[i], layout, CONFIG);
    });
    return found;
  }
  function drawCurves() {
    const runs = visible(), names = [state.metric, ...state.panels.filter((name) => name !== state.metric)];
    const found = drawPanels("curves", names, runs), traces = found.find((each) => each.length) || [];
    const many = !state.by.length && runs.length > MOST_COLORED, one = chosen();
    legend("curves-legend", single ? [] : traces.filter((trace) => trace.showlegend !== false).map((trace) => {
      const run = data.runs[trace.index];
      return run ? { label: shortened(run.label, 44), title: run.name, ...trace.line, action: () => choose(run), pressed: run === one } : { label: trace.label, ...trace.line };
    }));
    let hint = "";
    if (state.by.length) hint = "Mean over the finished runs of each group that have this metric, as far as the shortest of them goes; the band is one standard deviation. In a group without a finished run, over all that have not failed.";
    else if (many) hint = "The " + MOST_COLORED + " best by " + (isResult(state.metric) ? state.metric : data.metric) + " have colors; the others are gray. Choose a run in the table to highlight it, or group by a setting.";
    element("curves-hint").textContent = found[0] && found[0].length ? hint : "No run that is shown has " + state.metric + " by " + state.x + ".";
  }
  function drawHardware() {
    const names = data.hardware.filter((name) => name !== "samples/s" || !data.hardware.includes("tokens/s")), runs = visible(), colors = runColors(), one = chosen();
    const few = runs.length <= MOST_DRAWN || state.by.length, shown = few ? runs : runs.filter((run) => colors.has(run.index) || run === one);
    element("hardware-section").hidden = !names.length;
    element("hardware-hint").textContent = few ? "" : "Of the runs that have a color, and of the chosen one.";
    if (names.length) drawPanels("hardware", names, shown);
  }
