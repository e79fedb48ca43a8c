// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <set>
#include <type_traits>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/data/formats/readers.h"

namespace lockstep {
namespace {

constexpr int64_t kNoTarget = -100;  // which torch's losses ignore

// The records of a text, a line each, unless a quoted field has line breaks.
class CsvRecords {
 public:
  CsvRecords(std::string_view text, char separator) : text_(text), separator_(separator) {}

  // Gives the fields of the next one; false at the end. Empty lines are left out.
  bool next(std::vector<std::string>& fields) {
    while (place_ < text_.size()) {
      line_ = next_line_;
      read_record(fields);
      if (fields.size() > 1 || !fields[0].empty()) return true;
    }
    return false;
  }
  int64_t line() const { return line_; }  // where it begins, from 1

 private:
  void read_record(std::vector<std::string>& fields) {
    fields.assign(1, "");
    bool quoted = false;
    while (place_ < text_.size()) {
      const char c = text_[place_++];
      next_line_ += c == '\n' ? 1 : 0;
      const bool doubled = quoted && c == '"' && place_ < text_.size() && text_[place_] == '"';
      if (doubled)
        fields.back() += text_[place_++];
      else if (c == '"')
        quoted = !quoted;
      else if (quoted)
        fields.back() += c;
      else if (c == separator_)
        fields.emplace_back();
      else if (c == '\n')
        return;
      else if (c != '\r')
        fields.back() += c;
    }
  }

  std::string_view text_;
  char separator_;
  size_t place_ = 0;
  int64_t line_ = 0, next_line_ = 1;
};

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(' ');
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

template <class Number>
std::optional<Number> number_in(const std::string& field) {
  Number value{};
  if (!parse_number(trimmed(field), value)) return std::nullopt;
  if constexpr (std::is_floating_point_v<Number>)
    if (!std::isfinite(value)) return std::nullopt;
  return value;
}

// Numbers of a target, or its texts as classes: those of the table, if it has them already.
void set_target(Table& table, const std::vector<std::string>& texts, bool numbers) {
  const bool are_known = !table.classes.empty();
  std::vector<int64_t> classes;
  std::vector<float> values;
  for (const std::string& text : texts) {
    if (const auto value = number_in<float>(text)) values.push_back(*value);
    if (const auto label = number_in<int64_t>(text); label && *label >= 0) classes.push_back(*label);
  }
  if (!are_known && values.size() == texts.size() && (numbers || classes.size() < texts.size())) {
    table.target = torch::tensor(values).view({-1, 1});
    return;
  }
  if (are_known || classes.size() < texts.size()) {
    const std::set<std::string> names(texts.begin(), texts.end());
    if (!are_known) table.classes.assign(names.begin(), names.end());
    classes.clear();
    for (const std::string& text : texts)
      classes.push_back(std::ranges::lower_bound(table.classes, text) - table.classes.begin());
  }
  table.target = torch::tensor(classes, torch::kInt64);
}

class CsvReader {
 public:
  CsvReader(const fs::path& path, std::string_view text, const TableOptions& options)
      : path_(path.string()), options_(options), records_(text, options.separator) {}

  Table read() {
    if (!records_.next(fields_)) throw error("it has no lines", "an empty file");
    names_ = fields_;
    find_target();
    Table table;
    bool more = true;
    if (is_header()) {
      table.columns = names_;
      if (has_target()) table.columns.erase(table.columns.begin() + static_cast<ptrdiff_t>(target_));
      more = records_.next(fields_);
    }
    for (; more; more = records_.next(fields_)) add_row();
    if (rows_ == 0) throw error("it has a line of names, but no rows", "a file that was cut");
    table.data = torch::tensor(values_).view({rows_, -1});
    table.classes = options_.classes;
    if (!has_target()) {
      table.target = torch::full({rows_}, kNoTarget, torch::kInt64);
      return table;
    }
    require_targets();
    set_target(table, targets_, options_.numbers);
    return table;
  }

 private:
  DataError error(const std::string& what, const std::string& likely) const {
    return DataError({.what = concat("can't read a table: ", what),
                      .here = concat(path_, ", line ", records_.line()),
                      .likely = likely,
                      .next = "every column but the target needs a number in each line; docs/data.md has the options"});
  }

  bool has_target() const { return target_ < names_.size(); }

  void find_target() {
    target_ = names_.size();
    if (std::ssize(names_) == options_.inputs) return;
    if (names_.size() < 2) throw error("there is one column", "another separator: csv:FILE?separator=;");
    target_ = names_.size() - 1;
    if (options_.target.empty()) return;
    const auto found = std::ranges::find(names_, options_.target);
    if (found == names_.end())
      throw UsageError({.what = concat(path_, " has no column ", options_.target),
                        .here = concat("columns: ", join(names_, ", ")),
                        .next = "give target= the name of one of them"});
    target_ = to_size(found - names_.begin());
  }

  bool is_header() const {
    if (!options_.target.empty()) return true;
    return std::any_of(fields_.begin(), fields_.end() - (has_target() ? 1 : 0),
                       [](const std::string& field) { return !number_in<float>(field); });
  }

  void add_row() {
    if (fields_.size() != names_.size())
      throw error(concat(fields_.size(), " columns, not ", names_.size()), "a separator in a text without quotes");
    for (size_t i = 0; i < fields_.size(); ++i) {
      if (i == target_) continue;
      const auto value = number_in<float>(fields_[i]);
      if (!value)
        throw error(
            concat("'", fields_[i], "' in column ", names_[i], " is not a number"),
            fields_[i].empty() ? "a value that is missing" : "a column of texts, which must first become numbers");
      values_.push_back(*value);
    }
    ++rows_;
    if (!has_target()) return;
    if (trimmed(fields_[target_]).empty())
      throw error(concat("no target in column ", names_[target_]), "a value that is missing");
    targets_.push_back(fields_[target_]);
  }

  void require_targets() const {
    const auto& classes = options_.classes;
    for (const std::string& text : targets_) {
      if (options_.numbers && !number_in<float>(text))
        throw error(concat("numbers=1, but a target is '", text, "'"), "a column of classes");
      if (!classes.empty() && std::ranges::find(classes, text) == classes.end())
        throw error(concat("'", text, "' is not one of the classes ", join(classes, ", ")),
                    "other data than in training");
    }
  }

  std::string path_;
  TableOptions options_;
  CsvRecords records_;
  std::vector<std::string> fields_, names_;
  size_t target_ = 0;  // of all columns; as many as there are: none
  int64_t rows_ = 0;
  std::vector<float> values_;
  std::vector<std::string> targets_;
};

}  // namespace

Table read_csv(const fs::path& path, const TableOptions& options) {
  const Bytes bytes = DataFile(path).read_all();
  return CsvReader(path, {reinterpret_cast<const char*>(bytes.data()), bytes.size()}, options).read();
}

}  // namespace lockstep
