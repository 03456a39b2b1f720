/** The list in an answer: some routes give it bare, some under its name. No DOM here. */

/** @param {unknown} answer @param {...string} names @returns {any[]} */
export function listOf(answer, ...names) {
  if (Array.isArray(answer)) return answer;
  for (const name of names) {
    const list = /** @type {any} */ (answer)?.[name];
    if (Array.isArray(list)) return list;
  }
  return [];
}
