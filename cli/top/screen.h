// SPDX-License-Identifier: Apache-2.0
// cli/top/screen.h: the live view in a terminal, with ncurses.
//
// Flow:    cli/top/watch.h, cli/top/layout.h -> here -> the terminal
// Owns:    the terminal, which it gives back as it was
// Threads: main's
#pragma once

namespace lockstep::top {

int show_screen(double interval);  // seconds between looks; blocks until q is pressed

}  // namespace lockstep::top
