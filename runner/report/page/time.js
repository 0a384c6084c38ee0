  // ---- time line and goodput ----------------------------------------------------------------------------------

  const ENDS = { finished: ["#008a66", "circle"], killed: ["#d55e00", "x"], crash: ["#d55e00", "x"], failed: ["#d55e00", "x"],
    hang: ["#d55e00", "x"],
    preempted: ["#a87400", "triangle-right"], requeued: ["#a87400", "triangle-right"], "time limit": ["#a87400", "triangle-right"],
    interrupted: ["#2f8fc4", "triangle-right"], cancelled: ["#6f6c5a", "square"] };
  const BUCKET_COLORS = {
    start: "#2f8fc4", restore: "#b35c92", useful: "#008a66", repeated: "#d55e00", save: "#a87400",
    data: "#0072b2", evaluation: "#6f6c5a", end: "#8b949d", queue: "#6b7480", hold: "#4d5560",
  };
  const MOST_LINES = 200;
  // Return labels next to bars: as wide as they need, but the bars get more than half of the page.
  function beside(labels, id) {
    const width = Math.min(360, 12 + 6.2 * Math.max(...labels.map((label) => label.length), 1), 0.4 * element(id).clientWidth);
    return { width, tickvals: [...labels], ticktext: labels.map((label) => escaped(shortened(label, Math.floor((width - 12) / 6.2)))) };
  }
  function drawTimeline() {
    const runs = visible().filter((run) => run.attempts.length).slice(0, MOST_LINES);
    const labels = runs.map((run) => run.name), traces = [];
    const bars = { type: "bar", orientation: "h", base: [], x: [], y: [], text: [], textposition: "none", marker: { color: "#7f8c9a" }, name: "attempt",
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
      const [color, symbol] = ENDS[kind] || (kind === "evaluation" ? ["#000000", "line-ns-open"] : ["#b35c92", "diamond"]);
      traces.push({ type: "scatter", mode: "markers", name: escaped(kind), ...at, marker: { color, symbol, size: kind === "evaluation" ? 8 : 9 }, hovertemplate: "%{text}<extra></extra>" });
    }
    const height = Math.max(160, 90 + 20 * labels.length), { width, ...ticks } = beside(labels, "timeline-section");
    element("timeline").style.height = height + "px";
    plotOrNothing("timeline", labels.length ? traces : [], { ...LAYOUT, height, barmode: "overlay", bargap: 0.45, margin: { l: width, r: 20, t: 10, b: 60 },
      xaxis: { type: "date", gridcolor: GRID, tickangle: 0, nticks: Math.max(2, Math.floor((element("timeline-section").clientWidth - width) / 110)) }, yaxis: { type: "category", categoryarray: labels.reverse(), categoryorder: "array", automargin: false, range: [-0.7, labels.length - 0.3], tickfont: { size: 11 },
        ...ticks },
      hovermode: "closest", showlegend: true, legend: { orientation: "h", y: -60 / height } }, PLAIN);
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
      customdata: bars.map(([, seconds]) => hours(seconds[bucket] || 0)), marker: { color: BUCKET_COLORS[bucket], line: { color: "#fff", width: 1 } },
      hovertemplate: "%{x:.1%} (%{customdata})<extra>%{fullData.name}</extra>" }));
    const labels = bars.map(([name]) => name), { width, ...ticks } = beside(labels, "goodput-section"), height = 50 + 22 * bars.length;
    element("goodput").style.height = height + "px";
    plotOrNothing("goodput", whole ? traces : [], { ...LAYOUT, height, barmode: "stack", bargap: 0.3,
      margin: { l: width, r: 20, t: 10, b: 30 }, showlegend: false,
      xaxis: { tickformat: ".0%", range: [0, 1], gridcolor: GRID },
      yaxis: { type: "category", ...ticks, tickfont: { size: 11 } } }, PLAIN);
    const body = head(element("goodput-table"), [{ title: "node time" }, { title: "time", kind: "number" }, { title: "share", kind: "number" }]);
    for (const bucket of all.filter((each) => sum[each])) {
      const row = body.insertRow();
      cell(row, data.buckets[bucket]).prepend(swatch(BUCKET_COLORS[bucket])); cell(row, hours(sum[bucket]), "number");
      cell(row, data.waiting.includes(bucket) ? "" : share(whole ? sum[bucket] / whole : 0), "number");
    }
  }
