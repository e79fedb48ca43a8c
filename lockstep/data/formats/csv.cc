// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/formats/readers.h"

#include <csv.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

#include "lockstep/base/text.h"
#include "lockstep/data/formats/mapped_file.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

std::optional<float> to_number(std::string_view text) {
  float value = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return std::nullopt;
  return value;
}

// What libcsv calls back with fields and ends of lines. It is C: an error is kept until it has returned.
class Table {
 public:
  explicit Table(std::filesystem::path path) : path_(std::move(path)) {}

  void field(std::string_view text) {
    if (error_) return;
    if (line_ == 0)
      first_.emplace_back(text);
    else
      add(text);
  }

  void end_of_line() {
    if (error_) return;
    if (line_++ == 0) return take_first_line();
    if (in_line_ != first_.size()) refuse(concat(in_line_, " fields, the first line has ", first_.size()), "");
    in_line_ = 0;
  }

  void refuse(const std::string& what, const std::string& column) {
    error_ = DataError(
        {.what = concat("line ", line_ + (column.empty() ? 0 : 1), " of ", path_.filename().string(), ": ", what),
         .here = column.empty() ? path_.string() : concat(path_.string(), ", column ", column),
         .likely = "a missing value, text in a column of numbers, or another delimiter",
         .next = "correct the file; every field must be a number"});
  }

  CsvTable finish() {
    if (error_) throw *error_;
    if (values_.empty())
      throw DataError({.what = concat(path_.filename().string(), " has no line of numbers"), .here = path_.string()});
    const auto columns = static_cast<std::int64_t>(first_.size());
    const auto rows = static_cast<std::int64_t>(values_.size()) / columns;
    return {names_, torch::from_blob(values_.data(), {rows, columns}, torch::kFloat32).clone()};
  }

 private:
  // Numbers, or the names of the columns.
  void take_first_line() {
    const bool numbers = std::all_of(first_.begin(), first_.end(), [](const auto& text) { return to_number(text); });
    for (std::size_t i = 0; i < first_.size(); ++i) names_.push_back(numbers ? std::to_string(i) : first_[i]);
    if (numbers)
      for (const std::string& text : first_) values_.push_back(*to_number(text));
  }

  void add(std::string_view text) {
    const auto value = to_number(text);
    const std::string column = in_line_ < names_.size() ? names_[in_line_] : std::to_string(in_line_);
    ++in_line_;
    if (!value)
      return refuse(text.empty() ? "an empty field" : concat("'", text.substr(0, 40), "' is not a number"), column);
    values_.push_back(*value);
  }

  std::filesystem::path path_;
  std::vector<std::string> first_;
  std::vector<std::string> names_;
  std::vector<float> values_;
  std::size_t line_ = 0;  // whole lines so far
  std::size_t in_line_ = 0;
  std::optional<DataError> error_;
};

void on_field(void* text, std::size_t bytes, void* table) {
  static_cast<Table*>(table)->field({static_cast<const char*>(text), bytes});
}
void on_line(int, void* table) { static_cast<Table*>(table)->end_of_line(); }

std::int64_t column_of(const CsvTable& table, const std::string& name) {
  if (name.empty()) return static_cast<std::int64_t>(table.names.size()) - 1;
  const auto found = std::find(table.names.begin(), table.names.end(), name);
  if (found != table.names.end()) return found - table.names.begin();
  int number = 0;
  if (parse_int(name, number) && number >= 0 && number < static_cast<int>(table.names.size())) return number;
  throw UsageError({.what = concat("there is no column ", name), .next = concat("one of: ", join(table.names, ", "))});
}

torch::Tensor to_classes(const torch::Tensor& values, const std::filesystem::path& path) {
  constexpr float kMost = 1 << 24;  // what float32 counts exactly
  const auto* value = values.const_data_ptr<float>();
  for (std::int64_t i = 0; i < values.numel(); ++i)
    if (!(value[i] >= 0) || value[i] > kMost || value[i] != std::floor(value[i]))
      throw DataError({.what = concat("the target of row ", i, " is ", value[i], ", which is no class"),
                       .here = path.string(),
                       .likely = "another column is the target, or it is a quantity",
                       .next = "name the column with target=, or say classes=0"});
  return values.to(torch::kInt64);
}

}  // namespace

CsvTable read_csv(const std::filesystem::path& path, char delimiter) {
  const MappedFile file(path);
  Table table(path);
  csv_parser parser;
  csv_init(&parser, CSV_STRICT | CSV_STRICT_FINI);
  csv_set_delim(&parser, static_cast<unsigned char>(delimiter));
  const std::size_t parsed = csv_parse(&parser, file.bytes().data(), file.bytes().size(), on_field, on_line, &table);
  const bool whole = parsed == file.bytes().size() && csv_fini(&parser, on_field, on_line, &table) == 0;
  const std::string why = whole ? "" : csv_strerror(csv_error(&parser));
  csv_free(&parser);
  if (!whole) table.refuse(why, "");
  return table.finish();
}

std::shared_ptr<const TensorDataset> csv_dataset(const std::filesystem::path& path, const CsvOptions& options) {
  const CsvTable table = read_csv(path, options.delimiter);
  const std::int64_t columns = table.values.size(1);
  const std::int64_t target = column_of(table, options.target);
  const torch::Tensor values = table.values.select(1, target).contiguous();
  const torch::Tensor data =
      torch::cat({table.values.slice(1, 0, target), table.values.slice(1, target + 1, columns)}, 1);
  return std::make_shared<TensorDataset>(path.filename().string(), data,
                                         options.classes ? to_classes(values, path) : values);
}

}  // namespace lockstep
