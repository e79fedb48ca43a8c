// SPDX-License-Identifier: Apache-2.0
#include <csv.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "lockstep/base/text.h"
#include "lockstep/data/formats/data_file.h"
#include "lockstep/data/formats/readers.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

// Takes fields and ends of lines from libcsv. It is C: an error is kept until it has returned.
class Table {
 public:
  explicit Table(std::filesystem::path path) : path_(std::move(path)) {}

  void field(std::string_view text) {
    if (error_) return;
    if (line_ == 0)
      columns_.emplace_back(text);
    else
      add(text);
  }

  void end_of_line() {
    if (error_) return;
    if (line_++ == 0) return take_first_line();
    if (in_line_ != columns_.size()) refuse(concat(in_line_, " fields, the first line has ", columns_.size()), "");
    in_line_ = 0;
  }

  void refuse(const std::string& what, const std::string& column) {
    error_ = DataError(
        {.what = concat("line ", line_ + (column.empty() ? 0 : 1), " of ", path_.filename().string(), ": ", what),
         .here = column.empty() ? path_.string() : concat(path_.string(), ", column ", column),
         .likely = "a missing value, text in a column of numbers, or another delimiter"});
  }

  // (rows, columns) float32
  torch::Tensor values() {
    if (error_) throw *error_;
    if (values_.empty())
      throw DataError({.what = concat(path_.filename().string(), " has no line of numbers"), .here = path_.string()});
    return torch::tensor(values_).view({-1, std::ssize(columns_)});
  }

  std::int64_t column(const std::string& name) const {
    if (name.empty()) return std::ssize(columns_) - 1;
    const auto found = std::ranges::find(columns_, name);
    if (found != columns_.end()) return found - columns_.begin();
    int number = 0;
    if (parse_number(name, number) && number >= 0 && number < std::ssize(columns_)) return number;
    throw UsageError({.what = concat("there is no column ", name), .next = concat("one of: ", join(columns_, ", "))});
  }

 private:
  // The names of the columns; or numbers, and columns are named "0", "1", ...
  void take_first_line() {
    std::vector<float> numbers(columns_.size());
    for (std::size_t i = 0; i < columns_.size(); ++i)
      if (!parse_number(columns_[i], numbers[i])) return;
    for (std::size_t i = 0; i < columns_.size(); ++i) columns_[i] = std::to_string(i);
    values_ = std::move(numbers);
  }

  void add(std::string_view text) {
    const std::size_t place = in_line_++;
    if (parse_number(text, values_.emplace_back())) return;
    refuse(text.empty() ? "an empty field" : concat("'", text.substr(0, 40), "' is not a number"),
           place < columns_.size() ? columns_[place] : std::to_string(place));
  }

  std::filesystem::path path_;
  std::vector<std::string> columns_;  // their names
  std::vector<float> values_;
  std::size_t line_ = 0;  // whole lines so far
  std::size_t in_line_ = 0;
  std::optional<DataError> error_;
};

void on_field(void* text, std::size_t bytes, void* table) {
  static_cast<Table*>(table)->field({static_cast<const char*>(text), bytes});
}
void on_line(int, void* table) { static_cast<Table*>(table)->end_of_line(); }

Table read_csv(const std::filesystem::path& path, char delimiter) {
  const DataFile file(path);
  Table table(path);
  csv_parser parser;
  csv_init(&parser, CSV_STRICT | CSV_STRICT_FINI);
  const std::unique_ptr<csv_parser, decltype(&csv_free)> freed(&parser, &csv_free);
  csv_set_delim(&parser, static_cast<unsigned char>(delimiter));
  std::vector<std::uint8_t> chunk(std::size_t{1} << 20);
  bool whole = true;
  for (std::uint64_t at = 0; whole && at < file.size(); at += chunk.size()) {
    chunk.resize(std::min(chunk.size(), file.size() - at));
    file.read(at, chunk);
    whole = csv_parse(&parser, chunk.data(), chunk.size(), on_field, on_line, &table) == chunk.size();
  }
  whole = whole && csv_fini(&parser, on_field, on_line, &table) == 0;
  if (!whole) table.refuse(csv_strerror(csv_error(&parser)), "");
  return table;
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

std::shared_ptr<const TensorDataset> csv_dataset(const std::filesystem::path& path, const CsvOptions& options) {
  Table table = read_csv(path, options.delimiter);
  const torch::Tensor values = table.values();
  const std::int64_t at = table.column(options.target);
  const torch::Tensor target = values.select(1, at).contiguous();
  const torch::Tensor data = torch::cat({values.slice(1, 0, at), values.slice(1, at + 1)}, 1);
  return std::make_shared<TensorDataset>(path.filename().string(), data,
                                         options.classes ? to_classes(target, path) : target);
}

}  // namespace lockstep
