(function () {
  'use strict';
  const at = id => document.getElementById(id);
  const { export: exported, pairs } = JSON.parse(at('data').textContent);
  const choices = [...document.querySelectorAll('[data-choice]')];
  let annotator = '', judged = {}, place = 0, shown = 0;

  // Which answer stands on the left differs from judge to judge, so that no answer gains by its place.
  function flipped(pair) {
    let sum = 7;
    for (const letter of annotator + pair.id) sum = (sum * 31 + letter.codePointAt(0)) % 1000003;
    return sum % 2 === 1;
  }
  const stored = () => 'stemma-feedback-' + exported + '-' + annotator;
  const current = () => pairs[place];
  const left = pair => flipped(pair) ? 'b' : 'a';
  const right = pair => flipped(pair) ? 'a' : 'b';

  function keep(changed) {
    const pair = current();
    judged[pair.id] = Object.assign({ left: left(pair) }, judged[pair.id], changed);
    localStorage.setItem(stored(), JSON.stringify(judged));
    count();
  }
  const chosen = pair => (judged[pair.id] || {}).choice;
  const done = () => pairs.filter(chosen).length;

  function count() {
    at('count').textContent = done() + ' of ' + pairs.length + ' judged';
    at('progress').value = done() / pairs.length;
    at('done').hidden = done() < pairs.length;
    at('save').disabled = !done();
  }

  function show() {
    const pair = current(), said = judged[pair.id] || {};
    const [one, other] = document.querySelectorAll('.answer .text');
    at('prompt').textContent = pair.prompt;
    one.textContent = pair[left(pair)] || '(no answer)';
    other.textContent = pair[right(pair)] || '(no answer)';
    for (const button of choices) {
      const value = { left: left(pair), right: right(pair) }[button.dataset.choice] || button.dataset.choice;
      button.setAttribute('aria-pressed', String(said.choice === value));
    }
    at('reason').value = said.reason || '';
    at('correction').value = said.correction || '';
    at('back').disabled = place === 0;
    at('next').disabled = !said.choice;
    shown = Date.now();
    count();
  }

  function choose(side) {
    const pair = current();
    const choice = { left: left(pair), right: right(pair) }[side] || side;
    keep({ choice, seconds: Math.round((Date.now() - shown) / 100) / 10 });
    for (const button of choices) button.setAttribute('aria-pressed', String(button.dataset.choice === side));
    at('next').disabled = false;
  }

  function next() {
    if (!chosen(current())) return;
    const open = pairs.findIndex((pair, number) => number > place && !chosen(pair));
    const any = pairs.findIndex(pair => !chosen(pair));
    place = open >= 0 ? open : any >= 0 ? any : Math.min(place + 1, pairs.length - 1);
    show();
  }

  function back() {
    place = Math.max(0, place - 1);
    show();
  }

  function correct() {
    const pair = current(), choice = chosen(pair), field = at('correction');
    if (!field.value && (choice === 'a' || choice === 'b')) keep({ correction: field.value = pair[choice] });
    field.focus();
  }

  function save() {
    const rows = pairs.filter(chosen).map(pair => {
      const row = Object.assign({ export: exported, pair: pair.id, annotator }, judged[pair.id]);
      // An answer that was taken over and not changed corrects nothing.
      if (row.correction === pair[row.choice]) row.correction = '';
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
    place = Math.max(0, pairs.findIndex(pair => !chosen(pair)));
    at('who').hidden = true;
    at('judging').hidden = at('keep').hidden = false;
    show();
  });
  for (const button of choices) button.addEventListener('click', () => choose(button.dataset.choice));
  at('next').addEventListener('click', next);
  at('back').addEventListener('click', back);
  at('save').addEventListener('click', save);
  for (const name of ['reason', 'correction']) at(name).addEventListener('input', () => keep({ [name]: at(name).value }));

  const keys = {
    1: () => choose('left'), 2: () => choose('right'), 3: () => choose('tie'), 4: () => choose('neither'),
    Enter: next, ArrowLeft: back, w: () => at('reason').focus(), c: correct, s: save,
  };
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
