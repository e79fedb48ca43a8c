// SPDX-License-Identifier: Apache-2.0
#include "lockstep/data/formats/readers.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/cache_line.h"
#include "lockstep/base/text.h"
#include "lockstep/base/to_size.h"

namespace lockstep {
namespace {

// The format (NEP 1): "\x93NUMPY", version 1.0 to 3.0, the length of a header, the header as a Python dictionary
// (descr, fortran_order, shape), then the values.
constexpr std::string_view kMagic("\x93NUMPY", 6);
constexpr size_t kMostDimensions = 16;
constexpr size_t kBegin = 10;  // of version 1's dictionary

DataError bad(const std::string& origin, const std::string& what) {
  return DataError({.what = concat("not a .npy array that can be read: ", what),
                    .here = origin,
                    .likely = "a damaged or cut file, or an array of Python objects",
                    .next = "save it again with numpy.save"});
}

// The text after `key` and a colon in the dictionary, without leading spaces.
std::string_view value_of(std::string_view header, std::string_view key, const std::string& origin) {
  const size_t at = header.find(key);
  const size_t colon = at == std::string_view::npos ? at : header.find(':', at);
  const size_t begin = colon == std::string_view::npos ? colon : header.find_first_not_of(' ', colon + 1);
  if (begin == std::string_view::npos) throw bad(origin, concat("its header has no ", key));
  return header.substr(begin);
}

using NpyType = std::pair<std::string_view, torch::ScalarType>;
constexpr NpyType kTypes[] = {{"|b1", torch::kBool},  {"|u1", torch::kUInt8},   {"|i1", torch::kInt8},
                              {"<i2", torch::kInt16}, {"<i4", torch::kInt32},   {"<i8", torch::kInt64},
                              {"<f2", torch::kHalf},  {"<f4", torch::kFloat32}, {"<f8", torch::kFloat64}};

torch::ScalarType dtype_of(std::string_view value, const std::string& origin) {
  const size_t end = value.size() > 1 && value[0] == '\'' ? value.find('\'', 1) : std::string_view::npos;
  if (end == std::string_view::npos) throw bad(origin, "it holds structures");
  const auto* const found = std::ranges::find(kTypes, value.substr(1, end - 1), &NpyType::first);
  if (found == std::end(kTypes))
    throw bad(origin, concat("dtype ", value.substr(0, end + 1),
                             "; bool, uint8, int8 to int64 and float16 to float64 in "
                             "little-endian order are read"));
  return found->second;
}

std::vector<int64_t> shape_of(std::string_view value, const std::string& origin) {
  const size_t end = value.find(')');
  if (value[0] != '(' || end == std::string_view::npos) throw bad(origin, "its shape is not a tuple");
  std::vector<int64_t> shape;
  for (const char* at = value.data() + 1; at < value.data() + end;) {
    int64_t size = 0;
    const auto [stop, error] = std::from_chars(at, value.data() + end, size);
    if (error != std::errc() || size < 0 || shape.size() == kMostDimensions) throw bad(origin, "an impossible shape");
    shape.push_back(size);
    for (at = stop; at < value.data() + end && (*at == ',' || *at == ' ');) ++at;
  }
  return shape;
}

}  // namespace

NpyHeader parse_npy(ByteView start, size_t all, const std::string& origin) {
  const std::string_view text(reinterpret_cast<const char*>(start.data()), start.size());
  if (text.size() < 12 || text.substr(0, 6) != kMagic) throw bad(origin, "no magic number");
  const uint8_t version = start[6];
  if (version < 1 || version > 3) throw bad(origin, concat("version ", int{version}));
  const size_t begin = version == 1 ? kBegin : 12;
  size_t length = start[8] | size_t{start[9]} << 8;
  if (version > 1) length |= size_t{start[10]} << 16 | size_t{start[11]} << 24;
  if (length > text.size() - begin) throw bad(origin, "cut in its header");
  const std::string_view header = text.substr(begin, length);
  NpyHeader parsed{.dtype = dtype_of(value_of(header, "'descr'", origin), origin),
                   .fortran = value_of(header, "'fortran_order'", origin).starts_with("True"),
                   .shape = shape_of(value_of(header, "'shape'", origin), origin),
                   .bytes = begin + length};
  const auto expected = product(parsed.shape, to_int64(c10::elementSize(parsed.dtype)));
  if (!expected) throw bad(origin, "its shape has more bytes than 64 bits can count");
  if (all - parsed.bytes != to_size(*expected))
    throw bad(origin, concat(*expected, " bytes promised, ", all - parsed.bytes, " found"));
  return parsed;
}

std::string npy_header(torch::ScalarType dtype, std::span<const int64_t> shape) {
  const auto* const type = std::ranges::find(kTypes + 1, std::end(kTypes), dtype, &NpyType::second);
  if (type == std::end(kTypes) || shape.size() > kMostDimensions)
    throw UsageError(
        {.what = concat(c10::toString(dtype), " of ", shape.size(), " dimensions can't be written as .npy")});
  std::string sizes;
  for (const int64_t size : shape) sizes += concat(size, ", ");
  std::string text = concat("{'descr': '", type->first, "', 'fortran_order': False, 'shape': (", sizes, "), }");
  text.resize(round_up(kBegin + text.size() + 1, size_t{64}) - kBegin - 1, ' ');
  const auto length = static_cast<uint16_t>(text.size() + 1);
  return concat(kMagic, '\1', '\0', static_cast<char>(length & 0xFF), static_cast<char>(length >> 8), text, '\n');
}

// A bool that is neither 0 nor 1 is undefined behaviour: they are read as bytes. Where the first dimension varies fastest, the
// values are those of the transposed array in C order.
Tensor read_npy(const fs::path& path) {
  constexpr size_t kLongestHeader = size_t{1} << 20;
  const DataFile file(path);
  Bytes start(std::min<size_t>(file.size(), kLongestHeader));
  file.read(0, start);
  NpyHeader header = parse_npy(start, file.size(), path.string());
  if (header.fortran) std::ranges::reverse(header.shape);
  const bool boolean = header.dtype == torch::kBool;
  Tensor tensor = torch::empty(header.shape, boolean ? torch::kUInt8 : header.dtype);
  file.read(header.bytes, {static_cast<uint8_t*>(tensor.data_ptr()), tensor.nbytes()});
  if (boolean) tensor = tensor.ne(0);
  if (!header.fortran) return tensor;
  std::vector<int64_t> order(header.shape.size());
  std::iota(order.rbegin(), order.rend(), 0);
  return tensor.permute(order).contiguous();
}

}  // namespace lockstep
