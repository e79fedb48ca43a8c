// data/csv.h: tables of numbers in CSV files (RFC 4180; libcsv reads them).
//
// Threads: any
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/data/tensor_dataset.h"

namespace lockstep {

struct CsvOptions {
  std::string target{};   // the column to predict: its name, or its number from 0; empty: the last one
  bool classes = true;    // the target is a class: a whole number >= 0; else any number
  char delimiter = ',';
};

struct CsvTable {
  std::vector<std::string> names;  // of the columns; "0", "1", ... in a file without a line of names
  torch::Tensor values;            // (rows, columns) float32
};

// The first line gives the names if any of its fields is not a number. Throws DataError naming line and column: a field that
// is empty or not a number, a line with more or fewer fields than the first, no line at all.
CsvTable read_csv(const std::filesystem::path& path, char delimiter = ',');

// data: (B, columns - 1) float32; target: (B) int64, or float32 where it is no class. Throws DataError, also for a target
// that is no class, and UsageError for a column that is not there.
std::shared_ptr<const TensorDataset> csv_dataset(const std::filesystem::path& path, const CsvOptions& options = {});

}  // namespace lockstep
