  // ---- settings and results: parallel coordinates as SVG, and a scatter plot ----------------------------------

  // Return the settings with a column, or those that have one by default.
  function comparedSettings() {
    const keys = state.columns ? data.keys.filter((key) => state.columns.includes("setting " + key)) : data.main;
    return (keys.length ? keys : data.main).filter((key) => key !== "fork");
  }
  // Return the position of values on an axis (0 to 1): by size if all are numbers (by ratio if far apart), else in order.
  function scaleOf(values) {
    const given = values.filter((value) => value !== null && value !== undefined), numbers = given.every((value) => typeof value === "number" && Number.isFinite(value));
    if (numbers && given.length) {
      const least = Math.min(...given), most = Math.max(...given), log = least > 0 && most / least >= 20, by = (value) => (log ? Math.log(value) : value);
      const ticks = [...new Set(given)].sort((a, b) => a - b), few = ticks.length <= 6 ? ticks : [least, most];
      return { at: (value) => (typeof value !== "number" ? null : most === least ? 0.5 : (by(value) - by(least)) / (by(most) - by(least))), ticks: few.map((value) => [value, String(value).length < 8 ? String(value) : text(value)]), log };
    }
    const list = [...new Set(given.map(asText))].sort(), at = (value) => (value === null || value === undefined ? null : list.length < 2 ? 0.5 : list.indexOf(asText(value)) / (list.length - 1));
    return { at, ticks: (list.length <= 12 ? list : [list[0], list[list.length - 1]]).map((value) => [value, value]) };
  }
  const reached = (run) => (isResult(state.metric) ? result(run, 1) : result(run, 0));
  function colorOf(run, scale) {
    const at = scale.at(reached(run));
    return at === null ? PALE : SCALE[Math.round(at * (SCALE.length - 1))];
  }
  function drawParallel(runs) {
    const keys = comparedSettings(), place = element("parallel"), width = Math.max(place.clientWidth, 300), height = 270, top = 34, bottom = 26;
    const verticals = [...keys.map((key) => ({ title: data.short[key], whole: key, value: (run) => run.settings[key] })), { title: (isResult(state.metric) ? "best " : "") + state.metric, value: reached }];
    const gap = (width - 150) / Math.max(verticals.length - 1, 1), x = (i) => 60 + i * gap;
    const svg = drawn("svg", { width, height, role: "img", "aria-label": "Parallel coordinates of " + verticals.map(({ title }) => title).join(", ") + "; the table of runs has the values" });
    verticals.forEach((axis) => { axis.scale = scaleOf(runs.map(axis.value)); axis.y = (value) => { const at = axis.scale.at(value); return at === null ? height - 6 : height - bottom - at * (height - top - bottom); }; });
    const results = verticals[verticals.length - 1].scale, one = chosen();
    for (const run of [...runs].sort((a, b) => (a === one) - (b === one))) {
      const points = verticals.map((axis, i) => [x(i), axis.y(axis.value(run))]);
      const line = drawn("polyline", { points: points.map((point) => point.map((part) => part.toFixed(1)).join(",")).join(" "), fill: "none", stroke: colorOf(run, results), "stroke-width": run === one ? 4 : 1.8 });
      line.append(drawn("title", {}));
      line.firstChild.textContent = run.name + ": " + text(reached(run));
      line.addEventListener("click", () => choose(run));
      svg.append(line);
    }
    const most = Math.max(6, Math.floor(gap / 7));
    verticals.forEach((axis, i) => {
      svg.append(drawn("line", { x1: x(i), x2: x(i), y1: top, y2: height - bottom, stroke: "#5b6570" }));
      const write = (content, at, kind) => { const made = drawn("text", { x: x(i) + (kind ? 0 : 5), y: at, class: kind }); made.textContent = shortened(content, most); made.append(drawn("title", {})); made.lastChild.textContent = axis.whole || content; svg.append(made); };
      write(axis.title, 16, "axis");
      for (const [value, label] of axis.scale.ticks) write(label, axis.y(value) + 4, "");
      if (runs.some((run) => axis.scale.at(axis.value(run)) === null)) write("none", height - 2, "");
    });
    place.replaceChildren(svg);
  }
  function drawScatter(runs) {
    const key = data.keys.includes(state.setting) ? state.setting : comparedSettings()[0];
    options(element("setting"), data.keys.filter((each) => each !== "fork").map((each) => [each, each]), key);
    const found = runs.filter((run) => key in run.settings && reached(run) !== null), scale = scaleOf(found.map((run) => run.settings[key])), results = scaleOf(found.map(reached));
    const one = chosen(), numbers = found.every((run) => typeof run.settings[key] === "number");
    const trace = { type: "scatter", mode: "markers", x: found.map((run) => (numbers ? run.settings[key] : shortened(asText(run.settings[key]), 20))), y: found.map(reached), text: found.map((run) => escaped(run.name)),
      marker: { opacity: 1, size: found.map((run) => (run === one ? 15 : 10)), color: found.map((run) => colorOf(run, results)), line: { color: "#fff", width: 1 } }, hovertemplate: "%{text}<br>%{x}: %{y:.5g}<extra></extra>" };
    plotOrNothing("scatter", found.length ? [trace] : [], { ...LAYOUT, hovermode: "closest", xaxis: { type: numbers ? (scale.log ? "log" : "linear") : "category", gridcolor: GRID, zeroline: false, title: { text: escaped(key), standoff: 8 } },
      yaxis: { gridcolor: GRID, zeroline: false, title: { text: escaped((isResult(state.metric) ? "best " : "") + state.metric) }, type: state.logy ? "log" : "linear" } }, PLAIN);
  }
  function drawSettings() {
    element("settings-section").hidden = single || !comparedSettings().length;
    if (element("settings-section").hidden) return;
    const runs = visible();
    drawParallel(runs);
    drawScatter(runs);
  }
