/** Text from outside (a reference, a JSON value, a header) as it may stand in a message: quoted, escaped, bounded. */
export function quote(text: string, limit = 200): string {
  const cut = text.length > limit ? `${text.slice(0, limit)}…` : text;
  return JSON.stringify(cut).replace(/[\u007f-\u009f\u2028\u2029]/g, escapeUnit);
}

/** Names in a row, at most `limit` of them. */
export function list(names: readonly string[], limit = 20): string {
  if (names.length === 0) return 'none';
  const shown = names.slice(0, limit).join(', ');
  return names.length > limit ? `${shown} and ${names.length - limit} more` : shown;
}

function escapeUnit(c: string): string {
  return `\\u${c.charCodeAt(0).toString(16).padStart(4, '0')}`;
}
