/** Nothing imports the benchmarks; `npm run bench` finds them by their file names. README.md lists them. */
export { benchErrors } from './errors.ts';
