// Light or dark: the system's choice until the button says otherwise; remembered where the browser lets us.
function remembered(value) {
  try {
    if (value === undefined) return localStorage.getItem("steadystep-theme");
    localStorage.setItem("steadystep-theme", value);
  } catch { /* a page from disk may have no storage */ }
  return value;
}

function startTheme() {
  const root = document.documentElement;
  const chosen = remembered();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  const button = document.querySelector("[data-theme-button]");
  if (!button) return;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const tell = () => (button.textContent = dark() ? "light" : "dark");
  button.addEventListener("click", () => {
    root.dataset.theme = remembered(dark() ? "light" : "dark");
    tell();
  });
  system.addEventListener("change", tell);
  tell();
}
