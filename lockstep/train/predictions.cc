// SPDX-License-Identifier: Apache-2.0
#include "lockstep/train/predictions.h"

#include <bit>
#include <iomanip>
#include <limits>
#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"
#include "lockstep/error.h"

namespace lockstep {
namespace {

static_assert(std::endian::native == std::endian::little);

// NEP 1, version 1.0: everything before the data, padded to a multiple of 64 bytes.
std::string npy_head(std::int64_t samples, torch::IntArrayRef sizes) {
  constexpr std::size_t kAlignment = 64, kBeforeText = 10;
  std::string shape = concat(samples, ",");
  for (const std::int64_t size : sizes) shape += concat(" ", size, ",");
  std::string text = concat("{'descr': '<f4', 'fortran_order': False, 'shape': (", shape, "), }");
  text.resize((kBeforeText + text.size()) / kAlignment * kAlignment + kAlignment - kBeforeText, ' ');
  text.back() = '\n';
  const auto size = static_cast<std::uint16_t>(text.size());
  return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(size & 0xFF) + static_cast<char>(size >> 8) + text;
}

std::string digits_of(float value) {
  return concat(std::setprecision(std::numeric_limits<float>::max_digits10), value);
}

// A field of a table (RFC 4180).
std::string csv_field(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? "\"\"" : std::string(1, c);
  return quoted + '"';
}

}  // namespace

PredictionFile::PredictionFile(const std::string& path, std::int64_t samples, std::int64_t classes,
                               std::vector<std::string> names)
    : file_(path), is_array_(path.ends_with(".npy")), samples_(samples), classes_(classes), names_(std::move(names)) {}

void PredictionFile::add(const torch::Tensor& outputs) {
  const torch::Tensor rows = outputs.to(torch::kFloat32).contiguous();
  is_array_ ? add_array(rows) : add_lines(rows.dim() == 1 ? rows.unsqueeze(1) : rows);
  written_ += rows.size(0);
}

void PredictionFile::finish() { file_.commit(); }

void PredictionFile::add_array(const torch::Tensor& outputs) {
  if (written_ == 0) {
    const std::string head = npy_head(samples_, outputs.sizes().slice(1));
    file_.write(head.data(), head.size());
  }
  file_.write(outputs.const_data_ptr(), outputs.nbytes());
}

// The class and its probability, or the numbers.
void PredictionFile::add_lines(const torch::Tensor& outputs) {
  if (outputs.dim() != 2)
    throw UsageError({.what = concat("outputs of shape ", outputs.sizes().slice(1), " for each sample in a .csv file"),
                      .next = "give --output a name that ends in .npy"});
  std::string text;
  if (written_ == 0) {
    text = "sample";
    if (classes_ > 0) text += ",class,probability";
    for (std::int64_t i = 0; classes_ == 0 && i < outputs.size(1); ++i) text += concat(",output", i);
    text += '\n';
  }
  const auto [probability, best] = classes_ > 0 ? outputs.softmax(1).max(1) : std::tuple(outputs, outputs);
  for (std::int64_t row = 0; row < outputs.size(0); ++row) {
    text += concat(written_ + row);
    if (classes_ > 0) {
      const auto label = best[row].item<std::int64_t>();
      text += concat(',', names_.empty() ? concat(label) : csv_field(names_[to_size(label)]), ',',
                     digits_of(probability[row].item<float>()));
    } else {
      for (std::int64_t i = 0; i < outputs.size(1); ++i) text += ',' + digits_of(outputs[row][i].item<float>());
    }
    text += '\n';
  }
  file_.write(text.data(), text.size());
}

}  // namespace lockstep
