(function () {
  'use strict';
  const at = id => document.getElementById(id);
  const { export: exported, kind, items } = JSON.parse(at('data').textContent);
  const choices = [...document.querySelectorAll('[data-choice]')];
  const fields = ['reason', 'correction'].filter(at);
  let annotator = '', judged = {}, place = 0, shown = 0;

  // Which answer stands on the left differs from judge to judge, so that no answer gains by its place.
  function flipped(pair) {
    let sum = 7;
    for (const letter of annotator + pair.id) sum = (sum * 31 + letter.codePointAt(0)) % 1000003;
    return sum % 2 === 1;
  }
  const stored = () => 'stemma-feedback-' + exported + '-' + annotator;
  const current = () => items[place];
  const left = pair => flipped(pair) ? 'b' : 'a';
  const right = pair => flipped(pair) ? 'a' : 'b';
  // What a button stands for: an answer by its place, or what it says itself.
  const meant = (item, side) => kind === 'pair' && { left: left(item), right: right(item) }[side] || side;

  function keep(changed) {
    const item = current();
    judged[item.id] = Object.assign(kind === 'pair' ? { left: left(item) } : {}, judged[item.id], changed);
    localStorage.setItem(stored(), JSON.stringify(judged));
    count();
  }
  const chosen = pair => (judged[pair.id] || {}).choice;
  const done = () => items.filter(chosen).length;

  function count() {
    at('count').textContent = done() + ' of ' + items.length + ' judged';
    at('progress').value = done() / items.length;
    at('done').hidden = done() < items.length;
    at('save').disabled = !done();
  }

  function show() {
    const item = current(), said = judged[item.id] || {};
    at('prompt').textContent = item.prompt;
    for (const text of document.querySelectorAll('.answer .text'))
      text.textContent = item[meant(item, text.parentElement.dataset.choice)] || '(no answer)';
    for (const button of choices)
      button.setAttribute('aria-pressed', String(said.choice === meant(item, button.dataset.choice)));
    for (const name of fields) at(name).value = said[name] || '';
    at('back').disabled = place === 0;
    at('next').disabled = !said.choice;
    shown = Date.now();
    count();
  }

  function choose(side) {
    keep({ choice: meant(current(), side), seconds: Math.round((Date.now() - shown) / 100) / 10 });
    for (const button of choices) button.setAttribute('aria-pressed', String(button.dataset.choice === side));
    at('next').disabled = false;
  }

  function next() {
    if (!chosen(current())) return;
    const open = items.findIndex((pair, number) => number > place && !chosen(pair));
    const any = items.findIndex(pair => !chosen(pair));
    place = open >= 0 ? open : any >= 0 ? any : Math.min(place + 1, items.length - 1);
    show();
  }

  function back() {
    place = Math.max(0, place - 1);
    show();
  }

  function correct() {
    if (!fields.includes('correction')) return;
    const pair = current(), choice = chosen(pair), field = at('correction');
    if (!field.value && (choice === 'a' || choice === 'b')) keep({ correction: field.value = pair[choice] });
    field.focus();
  }

  function save() {
    const rows = items.filter(chosen).map(pair => {
      const row = Object.assign({ export: exported, [kind]: pair.id, annotator }, judged[pair.id]);
      // An answer that was taken over and not changed corrects nothing.
      if (row.correction && [pair.a, pair.b].includes(row.correction)) row.correction = '';
      return JSON.stringify(row);
    });
    const link = document.createElement('a');
    link.href = URL.createObjectURL(new Blob([rows.join('\n') + '\n'], { type: 'application/x-ndjson' }));
    link.download = 'judgements-' + annotator.replace(/[^\p{L}\p{N}]+/gu, '-') + '.jsonl';
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  at('who').addEventListener('submit', event => {
    event.preventDefault();
    annotator = at('name').value.trim();
    if (!annotator) return;
    judged = JSON.parse(localStorage.getItem(stored()) || '{}');
    place = Math.max(0, items.findIndex(pair => !chosen(pair)));
    at('who').hidden = true;
    at('judging').hidden = at('keep').hidden = false;
    show();
  });
  for (const button of choices) button.addEventListener('click', () => choose(button.dataset.choice));
  at('next').addEventListener('click', next);
  at('back').addEventListener('click', back);
  at('save').addEventListener('click', save);
  for (const name of fields) at(name).addEventListener('input', () => keep({ [name]: at(name).value }));

  const keys = { Enter: next, ArrowLeft: back, w: () => at('reason').focus(), c: correct, s: save };
  choices.forEach((button, number) => { keys[number + 1] = () => choose(button.dataset.choice); });
  document.addEventListener('keydown', event => {
    if (at('judging').hidden || event.ctrlKey || event.metaKey || event.altKey) return;
    const writing = event.target.tagName === 'TEXTAREA';
    if (writing && event.key === 'Escape') event.target.blur();
    // In a field Enter is a new line; Ctrl and the like belong to the browser.
    if (writing || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
})();
