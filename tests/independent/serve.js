// Runs lock.js as often as it is asked, each time from its first line on, in one process:
//   node serve.js     reads lines of JSON {arguments, queries}, and prints one {status, out, error} for each
const fs = require('fs'), path = require('path'), readline = require('readline');
const run = new Function('require', 'module', 'exports', 'process', 'console', 'Buffer',
  fs.readFileSync(path.join(__dirname, 'lock.js'), 'utf8'));
function answer({ arguments: words, queries }) {
  const out = [], module = { exports: {} };
  const read = (file, ...rest) => (file === 0 ? queries : fs.readFileSync(file, ...rest));
  const own = (name) => (name === 'fs' ? { ...fs, readFileSync: read } : require(name));
  const process = { argv: ['node', 'lock.js', ...words], exitCode: 0, stdout: { write: (text) => out.push(text) } };
  try {
    run(Object.assign(own, { main: module }), module, module.exports, process,
      { log: (text) => out.push(`${text}\n`) }, Buffer);
  } catch (error) {
    return { status: 1, out: out.join(''), error: `${error.stack}` };
  }
  return { status: process.exitCode, out: out.join(''), error: '' };
}
readline.createInterface({ input: process.stdin }).on('line', (line) => {
  process.stdout.write(`${JSON.stringify(answer(JSON.parse(line)))}\n`);
});
