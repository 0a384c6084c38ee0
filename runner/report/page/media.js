  // ---- images and texts: of all runs in a row, at one step -------------------------------------------

  const MOST_BESIDE = 24;
  // Return the entry of a step, or else the newest one before it.
  function upTo(list, step) { return [...list].reverse().find(([at]) => at <= step) || null; }
  function mediaCard(run, name, step, color) {
    const card = make("figure"), found = upTo(run.media[name], step), title = make("figcaption", shortened(run.label, 40));
    title.prepend(swatch(...(color || [PALE])));
    title.title = run.name;
    card.append(title);
    if (!found) { card.append(make("p", "nothing up to this step", "hint")); return card; }
    const [at, isImage, content] = found, alt = name + " of " + run.name + " at step " + at;
    if (isImage) {
      const image = make("img");
      image.src = "data:image/png;base64," + content;
      image.alt = alt;
      card.append(image);
    } else {
      const words = make("pre", content);
      words.tabIndex = 0;
      words.setAttribute("aria-label", alt);
      card.append(words);
    }
    card.append(make("p", "step " + at, "hint"));
    return card;
  }
  function drawMedia() {
    const runs = visible(), names = [...new Set(data.runs.flatMap((run) => Object.keys(run.media)))].sort();
    element("media-section").hidden = !names.length && !data.left_out;
    element("media-note").textContent = data.left_out;
    const name = names.includes(state.media) ? state.media : names[0];
    element("media-controls").hidden = !name;
    options(element("media"), names.map((each) => [each, each]), name);
    const having = ranked(runs).filter((run) => name in run.media), colors = runColors();
    const steps = [...new Set(data.runs.flatMap((run) => (run.media[name] || []).map(([at]) => at)))].sort((a, b) => a - b);
    const last = steps.length - 1, place = state.at < 0 ? last : Math.max(0, steps.filter((at) => at <= state.at).length - 1), slider = element("media-step");
    slider.max = String(Math.max(last, 0)); slider.value = String(Math.max(place, 0));
    slider.oninput = () => { state.at = Number(slider.value) === last ? -1 : steps[Number(slider.value)]; remember(); drawMedia(); };
    slider.setAttribute("aria-valuetext", "step " + steps[place]);
    element("media-at").textContent = steps.length ? "step " + steps[place] : "";
    element("media-runs").replaceChildren(...having.slice(0, MOST_BESIDE).map((run) => mediaCard(run, name, steps[place], colors.get(run.index))));
    if (having.length > MOST_BESIDE) element("media-note").textContent += " The first " + MOST_BESIDE + " of " + having.length + " runs are shown: filter for others.";
  }
