  // ---- tables -------------------------------------------------------------------------------------------------

  const MOST_TEXT = 28;  // characters of a value in the table of runs
  function cell(row, value, kind, most = Infinity) {
    const made = row.insertCell(), whole = text(value);
    made.textContent = shortened(whole, most);
    if (kind) made.className = kind;
    if (whole.length > Math.min(most, 40)) made.title = whole;
    return made;
  }
  // Write the titles: text, or buttons that sort.
  function head(table, titles) {
    table.tHead && table.tHead.remove();
    for (const body of [...table.tBodies]) body.remove();
    const row = table.createTHead().insertRow();
    for (const { title, kind, action, sorted, whole } of titles) {
      const made = make("th", action ? "" : title, kind);
      made.scope = "col";
      if (whole && whole !== title) made.title = whole;
      if (action) {
        const button = make("button", title + (sorted ? (sorted === "descending" ? " ▾" : " ▴") : ""));
        button.type = "button";
        made.append(button);
        made.setAttribute("aria-sort", sorted || "none");
        made.addEventListener("click", action);
      }
      row.appendChild(made);
    }
    return table.createTBody();
  }
  const plainHead = (...titles) => titles.map((title) => ({ title }));
  function fill(table, titles, rows) {
    const body = head(table, plainHead(...titles));
    for (const values of rows) { const row = body.insertRow(); for (const value of values) cell(row, value); }
    table.parentElement.hidden = !rows.length;
  }

  // ---- the table of runs --------------------------------------------------------------------------------------

  // Return the columns: key, title, value of a run, formatting, whether it is shown by default.
  function allColumns() {
    const ranks = isResult(state.metric), metric = state.metric, several = data.runs.some((run) => run.ranks);
    const last = (run) => (run.metrics[metric] ? result(run, 0) : used(run, metric)), isNumber = (key) => data.runs.some((run) => typeof run.settings[key] === "number");
    const column = (key, title, value, more = {}) => ({ key, title, value, kind: "number", ...more });
    return [
      column("rank", "rank", null, { shown: ranks }), column("name", "run", (run) => run.name, { kind: "name", shown: true }),
      column("last", metric, last, { shown: true, write: (value, run) => (value === null && result(run, 1) !== null ? "not finite" : value) }),
      column("best", "best", (run) => result(run, 1), { shown: ranks }), column("best step", "at step", (run) => result(run, 2), { shown: ranks }),
      column("state", "state", (run) => run.state, { kind: "", shown: true }), column("steps", "step", (run) => run.steps, { shown: true }),
      ...data.keys.map((key) => column("setting " + key, data.short[key], (run) => run.settings[key],
        { whole: key, kind: isNumber(key) ? "number" : "", shown: data.main.includes(key) && key !== "fork", write: (value, run) => (typeof value === "number" ? Number(value.toPrecision(12)).toString() : key in run.settings ? asText(value) : "") })),
      column("ranks", "ranks", (run) => run.ranks || 1, { shown: several }), column("attempts", "attempts", (run) => run.attempts.length || null),
      column("useful", "useful", (run) => run.useful, { write: share }),
      ...[...data.metrics, ...data.others].filter((name) => name !== metric).map((name) => column("last " + name, name, (run) => result(run, 0, name))),
      ...data.hardware.map((name) => column("used " + name, name, (run) => used(run, name))),
    ];
  }
  const isShown = (column) => (state.columns ? column.key === "name" || state.columns.includes(column.key) : Boolean(column.shown));
  function sortBy(key) { state.down = state.sort === key ? !state.down : false; state.sort = key; remember(); drawRuns(); element("runs").querySelector("[aria-sort]:not([aria-sort=none]) button")?.focus(); }
  // Sorted by rank, put each branch below its trunk, at the place of the best of both. Other orders are not changed.
  function inFamilies(order) {
    const among = new Set(order), trunk = (run) => { const found = run.fork && data.runs[run.fork.index]; return found && found !== run && among.has(found) ? found : null; };
    const below = new Map(), depths = new Map();
    const top = (run) => { const seen = new Set([run]); for (let up = trunk(run); up && !seen.has(up); up = trunk(up)) { seen.add(up); run = up; } return run; };
    for (const run of order) { const up = trunk(run); if (up) below.set(up, [...(below.get(up) || []), run]); }
    const walk = (run, depth) => { if (!depths.has(run)) { depths.set(run, depth); for (const branch of below.get(run) || []) walk(branch, depth + 1); } };
    for (const run of order) walk(top(run), 0);
    return depths;  // in the order of the rows
  }
  function drawRuns() {
    const columns = allColumns().filter(isShown), colors = runColors(), one = chosen();
    const order = ranked(visible()), ranks = new Map(order.filter((run) => result(run, 1) !== null).map((run, i) => [run, i + 1]));
    const column = allColumns().find(({ key }) => key === state.sort);
    let depths = new Map();
    if (column && column.value) order.sort((a, b) => compare(column.value(a), column.value(b)));
    else { depths = inFamilies(order); order.splice(0, order.length, ...depths.keys()); }
    if (state.down) order.reverse();
    const body = head(element("runs"), columns.map(({ key, title, whole, kind }) => ({ title, whole, kind, action: () => sortBy(key), sorted: state.sort === key ? (state.down ? "descending" : "ascending") : "" })));
    const most = element("runs").parentElement.clientWidth < 900 ? 34 : 56;
    for (const run of order) {
      const row = body.insertRow();
      row.classList.toggle("chosen", run === one);
      row.addEventListener("click", () => choose(run));
      for (const { key, kind, value, write } of columns) {
        const content = key === "rank" ? ranks.get(run) : value(run);
        const made = cell(row, write ? write(content, run) : content, kind, MOST_TEXT);
        if (key === "name") nameCell(made, run, colors, most, state.down ? 0 : depths.get(run) || 0);
        if (key === "state") { made.className = "state-" + run.state.replace(/ /g, "-"); made.title = run.reason || ""; }
      }
    }
    element("shown").textContent = order.length + " of " + data.runs.length + " runs";
    drawColumns();
  }
  function nameCell(made, run, colors, most, depth) {
    const button = make("button", shortened(run.label, most)), color = colors.get(run.index);
    button.type = "button";
    made.title = run.name + (run.fork ? "\nfork of " + run.fork.run + " at step " + run.fork.step : "");
    made.replaceChildren(...(depth ? [make("span", "\u00a0\u00a0".repeat(depth - 1) + "└ ", "mark")] : []), swatch(...(color && !state.by.length ? color : [PALE])), button);
  }
  function drawColumns() {
    const all = allColumns().filter(({ key }) => key !== "name");
    checkboxes(element("columns"), all.map((column) => [column.key, column.whole || column.title, isShown(column)]), (keys) => { state.columns = keys; });
  }
  // Write the boxes of a menu. Existing ones are kept, so that the focus is not lost.
  function checkboxes(place, entries, change) {
    const signature = JSON.stringify(entries.map(([key]) => key));
    if (place.dataset.signature !== signature) {
      place.dataset.signature = signature;
      place.replaceChildren(...entries.map(([key, title]) => {
        const label = make("label"), box = make("input");
        box.type = "checkbox"; box.value = key;
        label.append(box, " " + title);
        return label;
      }));
    }
    const boxes = [...place.querySelectorAll("input")];
    boxes.forEach((box, i) => { box.checked = entries[i][2]; });
    place.onchange = () => { change(boxes.filter((box) => box.checked).map((box) => box.value)); drawAll(); };
  }
  function drawConstants() {
    const keys = Object.keys(data.common.settings).sort();
    element("constants-title").textContent = "The same in all runs: " + keys.length + " settings";
    fill(element("constants"), ["setting", "value"], keys.map((key) => [key, asText(data.common.settings[key])]));
  }

  // ---- the table of groups ------------------------------------------------------------------------------------

  function drawGroups() {
    element("groups-section").hidden = !state.by.length;
    if (!state.by.length) return;
    const list = groups(visible()), styles = groupStyles(list), names = data.results.filter((name) => !name.includes("/"));
    const shown = [...(data.metrics.includes(state.metric) ? [state.metric] : []), ...names.filter((name) => name !== state.metric)].slice(0, 8);
    const body = head(element("groups"), [{ title: state.by.map((name) => data.short[name]).join(", ") }, { title: "runs", kind: "number" }, { title: "left out" }, ...shown.map((title) => ({ title, kind: "number" }))]);
    list.forEach((group, i) => {
      const row = body.insertRow();
      cell(row, group.key).prepend(swatch(...styles[i]));
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
  // Return the last values of finished runs; for different lengths, the values at the largest step that all have.
  function compared(runs, name) {
    const found = runs.filter((run) => run.finished && run.metrics[name] && series(run, name));
    const curves = found.map((run) => series(run, name)), last = new Set(curves.map((one) => one.x[one.x.length - 1]));
    if (last.size < 2) return { values: found.map((run) => run.metrics[name][0]).filter(Number.isFinite), at: "" };
    const common = curves.map((one) => new Set(one.x)).reduce((a, b) => new Set([...a].filter((step) => b.has(step))));
    const step = [...common].reduce((a, b) => Math.max(a, b), -1);
    return { values: curves.map((one) => one.y[one.x.indexOf(step)]).filter(Number.isFinite), at: " at step " + step };
  }
