// SPDX-License-Identifier: Apache-2.0
// tests/support.h: what several tests need.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <string>

#include "lockstep/error.h"

namespace lockstep::testing {

// "At once" in a test, in seconds: more than a busy machine adds, far less than the timeout of five minutes.
constexpr double kAtOnce = 30;

// A folder of its own for a test, gone afterwards.
class TempFolder {
 public:
  explicit TempFolder(const std::filesystem::path& in = std::filesystem::temp_directory_path()) {
    std::string pattern = (in / "lockstep-test-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  std::string path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  std::string file(const std::string& name) const { return path_ / name; }
  bool has(const std::string& name) const { return std::filesystem::exists(path_ / name); }

 private:
  std::filesystem::path path_;
};

// The message of the E that `call` throws; the test fails if it throws something else or nothing.
template <class E, class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "threw something else: " << error.what();
    return {};
  }
  ADD_FAILURE() << "threw nothing";
  return {};
}

// How often a test repeats what is random: `usual` in `make test`, more in `make soak`, which sets the variable.
inline int rounds(const char* variable, int usual) {
  const char* told = std::getenv(variable);
  return told != nullptr ? std::atoi(told) : usual;
}

// EXPECT_THAT(text, HasSubstr(part)) without gmock.
inline ::testing::AssertionResult contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "no \"" << part << "\" in:\n" << text;
}

}  // namespace lockstep::testing
