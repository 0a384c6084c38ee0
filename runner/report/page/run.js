  // ---- one run, or a comparison of two ----------------------------------------------------------------------

  function choose(run) {
    state.run = run.name;
    remember();
    const focused = document.activeElement && document.activeElement.closest("#runs, #curves-legend"), label = focused && document.activeElement.textContent;
    drawCurves(); drawRuns(); drawSettings(); drawOne(); drawHardware();
    if (focused) [...focused.querySelectorAll("button")].find((button) => button.textContent === label)?.focus();
  }
  const all = (run, part) => (run.state === "unreadable" ? {} : { ...data.common[part], ...run[part] });
  function resultText(run, name) {
    const [last, best, step] = run.metrics[name] || [];
    return name in run.metrics ? (last === null ? "not finite" : text(last)) + (best === null ? "" : ", best " + text(best) + " at step " + step) : "";
  }
  function factsOf(run) {
    const facts = { state: run.state + (run.reason ? ": " + run.reason : ""), steps: run.steps, directory: run.path };
    if (run.fork) facts["fork of"] = run.fork.run + " at step " + run.fork.step;
    for (const name of data.metrics.filter((name) => !name.includes("/"))) if (run.metrics[name]) facts[name] = resultText(run, name);
    for (const name of data.hardware) if (used(run, name) !== null) facts[name] = (name.includes("memory") ? "at most " : "median ") + Number(used(run, name).toPrecision(4));
    return facts;
  }
  // Return the rows that differ between two runs, or all rows of one run.
  function rowsOf(run, other, part, keys) {
    const mine = part === "facts" ? factsOf(run) : all(run, part), theirs = other && (part === "facts" ? factsOf(other) : all(other, part));
    const write = (found, key) => (key in found ? asText(found[key]) : "");
    const rows = (keys || [...new Set([...Object.keys(mine), ...Object.keys(theirs || {})])]).map((key) => [key, write(mine, key), ...(other ? [write(theirs, key)] : [])]);
    return other ? rows.filter(([key, a, b]) => a !== b && !["run.dir", "run.name"].includes(key)) : rows;
  }
  function drawOne() {
    const run = chosen(), other = state.beside && runNamed(state.beside) !== run ? runNamed(state.beside) : null;
    if (!run) return;
    element("one").value = run.name;
    element("beside").value = other ? other.name : "";
    const titles = ["", ...(other ? [run, other].map((each) => shortened(each.label, 40)) : [""])];
    for (const id of ["facts", "code"]) element(id).classList.toggle("alone", !other);
    fill(element("facts"), titles, [...rowsOf(run, other, "facts"), ...rowsOf(run, other, "settings", other ? null : data.main.filter((key) => key in run.settings && key !== "fork"))]);
    fill(element("code"), titles, [...rowsOf(run, other, "code"), ...rowsOf(run, other, "environment")]);
    element("code-same").hidden = !other || !element("code").parentElement.hidden;
    drawDiffs(other ? [run, other] : [run]);
    const config = Object.entries(all(run, "settings")).sort(([a], [b]) => (a < b ? -1 : 1));
    element("config-title").textContent = "All " + config.length + " settings of " + run.name;
    fill(element("config"), ["setting", "value"], config.map(([key, value]) => [key, asText(value)]));
    const time = (seconds) => Number.isFinite(seconds) ? new Date(1000 * seconds).toISOString().slice(0, 19).replace("T", " ") + " UTC" : "";
    const current = run.current ? [{ ...run.current, cause: "no end recorded", ended: null }] : [];
    fill(element("attempts"), ["attempt", "steps", "why it ended", "began", "ended", "took", "node", "ranks", "steps to repeat"], [...run.attempts, ...current].map((one) => [one.attempt, (one.start_step ?? "") + " to " + (one.end_step ?? ""), one.cause,
      time(one.started), time(one.ended), one.ended === null ? "" : hours(one.ended - one.started), one.node, one.ranks, one.steps_lost]));
    drawSources(run);
    drawMixture(run);
  }
  function drawDiffs(runs) {
    element("diffs").replaceChildren(...runs.flatMap((run) => run.diffs.map((digest) => {
      const details = make("details"), words = make("pre", digest in data.diffs ? data.diffs[digest] : "They are not on this page, which has those of 50 states of the code: see code.json in " + run.path);
      words.tabIndex = 0;
      details.append(make("summary", "Uncommitted changes " + digest + (runs.length > 1 ? " of " + shortened(run.label, 40) : "")), words);
      return details;
    })));
  }
  function drawSources(run) {
    const prefix = state.metric + "_by_source/", names = Object.keys(run.series).filter((name) => name.startsWith(prefix));
    const traces = names.map((name, i) => {
      const found = curve(run, name);
      return found && { x: found.x, y: found.y, name: escaped(name.slice(prefix.length)), label: name.slice(prefix.length), mode: found.x.length < 25 ? "lines+markers" : "lines",
        line: { color: COLORS[i % COLORS.length], dash: DASHES[Math.floor(i / COLORS.length) % DASHES.length], width: 1.6 }, hovertemplate: "%{x}: %{y:.5g}<extra>%{fullData.name}</extra>" };
    }).filter(Boolean);
    element("sources-title").textContent = traces.length ? state.metric + " by source" : "";
    plotOrNothing("sources", traces, axes({ ...LAYOUT }));
    legend("sources-legend", traces.map(({ label, line }) => ({ label, ...line })));
  }
  function drawMixture(run) {
    const pattern = /^sources\/(.*)\/samples$/;
    const found = Object.keys(run.series).map((name) => [pattern.exec(name), name]).filter(([match]) => match)
      .map(([match, name]) => ({ name: match[1], at: series(run, name) }));
    const layout = axes({ ...LAYOUT });
    layout.yaxis = { ...layout.yaxis, type: "linear", range: [0, 1], tickformat: ".0%" };
    const traces = found.length < 2 ? [] : mixtureTraces(run, found);
    element("mixture-title").textContent = traces.length ? "Shares of the mixture" : "";
    plotOrNothing("mixture", traces, layout, PLAIN);
    legend("mixture-legend", traces.map(({ label, fillcolor }) => ({ label, color: fillcolor })));
  }
  function mixtureTraces(run, found) {
    const xs = found.reduce((a, b) => (b.at.x.length > a.at.x.length ? b : a)).at.x, last = xs.length - 1, points = Math.min(80, last);
    const edges = Array.from({ length: points + 1 }, (_, i) => xs[Math.round(i * last / Math.max(points, 1))]);
    const traces = found.map(({ name }, i) => ({ name: escaped(name), label: name, stackgroup: "one", x: [], y: [], mode: "lines", fillcolor: COLORS[i % COLORS.length], line: { width: 0.5, color: "#fff" } }));
    const axis = state.x === "step" ? null : series(run, state.x);
    for (let i = 0; i < edges.length; i++) {
      const from = i ? edges[i - 1] : 0, to = edges[i];
      const given = found.map(({ at }) => interpolate(at, to) - (i ? interpolate(at, from) : 0));
      const sum = given.reduce((a, b) => a + b, 0);
      traces.forEach((trace, k) => { trace.x.push(axis ? interpolate(axis, to) : to); trace.y.push(sum ? given[k] / sum : 0); });
    }
    return traces;
  }
