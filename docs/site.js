// The excerpts of a search are of prose: outputs of commands are left out of them.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof Search === "undefined") return;
  const textOf = Search.htmlToText;
  Search.htmlToText = (html, anchor) => {
    const page = new DOMParser().parseFromString(html, "text/html");
    page.querySelectorAll(".highlight-console").forEach((block) => block.remove());
    return textOf(page.documentElement.outerHTML, anchor);
  };
});
