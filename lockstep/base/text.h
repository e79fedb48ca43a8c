// SPDX-License-Identifier: Apache-2.0
// base/text.h: the few string helpers that messages and tables need.
//
// fmt is used inside base/ only: libtorch carries another version of its headers, and whichever comes first on the
// include path breaks the other.
#pragma once

#include <charconv>
#include <chrono>
#include <concepts>
#include <cstdint>
#include <exception>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// "rank ", 3, " of ", 4 -> "rank 3 of 4"
template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// {0, 1, 3}, ", " -> "0, 1, 3"
template <class Parts = std::vector<std::string>>
std::string join(const Parts& parts, std::string_view separator) {
  std::ostringstream out;
  std::string_view before;
  for (const auto& part : parts) {
    out << before << part;
    before = separator;
  }
  return std::move(out).str();
}

std::vector<std::string> split(std::string_view text, char separator);

std::string fixed(double value, int digits);  // 3.14159, 2 -> "3.14"
std::string human_bytes(uint64_t bytes);      // 26214400 -> "25.0 MiB"
std::string human_seconds(double seconds);    // 0.0123 -> "12.3 ms"; 75 -> "1:15"
inline std::string human_seconds(std::chrono::nanoseconds time) {
  return human_seconds(std::chrono::duration<double>(time).count());
}
std::string with_thousands(int64_t value);  // 60000 -> "60,000"

std::string for_shell(const std::string& word);  // with single quotes where it needs them

std::string first_line_of(const std::exception& error);
std::string what_of(const std::exception& error);  // of an Error its `what` alone

// Reads the whole text as a number. Returns false if it is none, or does not fit.
template <std::integral Number>
bool parse_int(std::string_view text, Number& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace lockstep
