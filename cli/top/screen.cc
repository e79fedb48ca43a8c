// SPDX-License-Identifier: Apache-2.0
#include "cli/top/screen.h"

#include <clocale>

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cli/top/layout.h"
#include "cli/top/watch.h"
#include "lockstep/base/text.h"
#include "lockstep/error.h"

#define NCURSES_NOMACROS
#include <curses.h>

namespace lockstep::top {
namespace {

using Milliseconds = std::chrono::milliseconds;

// ncurses itself gives the terminal back on SIGINT and SIGTERM.
class Terminal {
 public:
  Terminal() {
    std::setlocale(LC_ALL, "");
    screen_ = ::newterm(nullptr, stdout, stdin);
    if (screen_ == nullptr)
      throw UsageError({.what = "this terminal is not known",
                        .likely = "TERM is not set, or names no terminal",
                        .next = "use --once, or set TERM"});
    ::cbreak();
    ::noecho();
    ::keypad(stdscr, TRUE);
    ::curs_set(0);
    ::start_color();
    ::use_default_colors();
    ::init_pair(kWarningPair, COLOR_RED, -1);
    ::init_pair(kFinePair, COLOR_GREEN, -1);
  }
  ~Terminal() {
    ::endwin();
    ::delscreen(screen_);
  }
  Terminal(const Terminal&) = delete;
  Terminal& operator=(const Terminal&) = delete;

  static void put(int y, const Line& line) {
    const int attributes = attributes_of(line.style);
    ::attron(attributes);
    ::mvaddnstr(y, 0, line.text.c_str(), COLS);
    ::attroff(attributes);
  }

 private:
  static constexpr short kWarningPair = 1, kFinePair = 2;

  static int attributes_of(Style style) {
    switch (style) {
      case Style::kTitle: return A_BOLD;
      case Style::kHeading: return A_REVERSE;
      case Style::kWarning: return COLOR_PAIR(kWarningPair) | A_BOLD;
      case Style::kFine: return COLOR_PAIR(kFinePair);
      default: return A_NORMAL;
    }
  }

  SCREEN* screen_ = nullptr;
};

class View {
 public:
  void set_jobs(std::vector<JobView> jobs) {
    jobs_ = std::move(jobs);
    choose(0);
  }

  void draw() const {
    ::erase();
    int y = 0;
    const auto put = [&y](const Line& line) {
      if (y < LINES) Terminal::put(y++, line);
    };
    if (jobs_.empty()) {
      for (const std::string& text : fold("no job of this user is running on this machine; q quits", COLS)) put({text});
    } else {
      if (jobs_.size() > 1) put_list(put);
      for (const Line& line : lines_of(jobs_[chosen()], COLS, skip_)) put(line);
      put_help(y);
    }
    ::refresh();
  }

  // False: it was the last one.
  bool press(int key) {
    switch (key) {
      case 'q':
      case 'Q': return false;
      case KEY_DOWN:
      case '\t':
      case 'j': choose(1); break;
      case KEY_UP:
      case KEY_BTAB:
      case 'k': choose(-1); break;
      case KEY_NPAGE: scroll_by(LINES / 2); break;
      case KEY_PPAGE: scroll_by(-LINES / 2); break;
      default: break;
    }
    return true;
  }

 private:
  std::size_t chosen() const {
    const auto found = std::ranges::find(jobs_, number_, [](const JobView& view) { return view.job.number; });
    return found == jobs_.end() ? 0 : static_cast<std::size_t>(found - jobs_.begin());
  }

  void choose(int further) {
    if (jobs_.empty()) return;
    const auto size = std::ssize(jobs_);
    const auto next = (static_cast<std::ptrdiff_t>(chosen()) + further + size) % size;
    const int number = jobs_[static_cast<std::size_t>(next)].job.number;
    if (number != number_) skip_ = 0;
    number_ = number;
  }

  void scroll_by(int ranks) {
    const int most = jobs_.empty() ? 0 : static_cast<int>(jobs_[chosen()].ranks.size()) - 1;
    skip_ = std::clamp(skip_ + ranks, 0, most);
  }

  template <class Put>
  void put_list(const Put& put) const {
    for (std::size_t i = 0; i < jobs_.size(); ++i) {
      const bool here = i == chosen();
      put({(here ? "* " : "  ") + one_line_of(jobs_[i], COLS - 2), here ? Style::kTitle : Style::kPlain});
    }
    put({""});
  }

  static void put_help(int y) {
    if (y >= LINES) return;
    std::string help;
    for (const char* part : {"q quits", "arrows or tab: job", "PgUp, PgDn: ranks"}) {
      const std::string longer = help.empty() ? part : concat(help, "   ", part);
      if (std::ssize(longer) <= COLS) help = longer;
    }
    Terminal::put(LINES - 1, {help});
  }

  std::vector<JobView> jobs_{};
  int number_ = 0;  // of the chosen job
  int skip_ = 0;    // ranks
};

}  // namespace

int show_screen(double interval) {
  const auto pause = std::chrono::duration_cast<Milliseconds>(std::chrono::duration<double>(interval));
  Watch watch;
  View view;
  const Terminal terminal;
  view.set_jobs(watch.look());
  Deadline next = Deadline::after(std::min(pause, Milliseconds(300)));  // rates soon
  while (true) {
    view.draw();
    ::timeout(static_cast<int>(std::max<Milliseconds::rep>(0, next.left().count())));
    const int key = ::getch();
    if (key != ERR && !view.press(key)) return 0;
    if (!next.passed()) continue;
    view.set_jobs(watch.look());
    next = Deadline::after(pause);
  }
}

}  // namespace lockstep::top
